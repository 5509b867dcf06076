"""Creates an HTML report of a run: what is wrong, where, and the evidence."""
