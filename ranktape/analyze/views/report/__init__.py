"""What does a run look like on one page that a colleague opens in a browser: what is wrong, where, and the evidence?"""
