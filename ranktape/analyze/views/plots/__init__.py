"""Draws the plots of a run: a table of what there is, functions that draw, and what writes the files."""
