"""Gives the metrics of two arrays that should be alike, and the distance of values in bits."""
