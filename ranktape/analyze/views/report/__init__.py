"""Makes one page of a run that a colleague opens in a browser: what is wrong, where, and the evidence."""
