"""Gives what a tensor loses at every scale that is tried."""
