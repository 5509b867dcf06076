"""Gives the distribution of the values of a digest: bins, a normal fit, binades, distances."""
