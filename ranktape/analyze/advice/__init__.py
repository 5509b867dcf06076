"""Recommends a scale and a format, and says what has to be known about them."""
