"""Gives what a tensor becomes in a low-precision format, with its scales and its losses."""
