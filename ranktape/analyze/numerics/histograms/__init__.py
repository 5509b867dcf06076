"""Counts how often each value occurs in a tensor, and in blocks with each kind of largest value."""
