"""Compares tensors: pairs the records of two sides, and measures the differences of each pair."""
