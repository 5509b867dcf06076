"""Finds what is wrong in a run, and where."""
