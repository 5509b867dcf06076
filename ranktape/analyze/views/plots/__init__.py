"""Draws the plots of a run: a table of plots, functions that draw them, and functions that write the files."""
