"""Replays the products of recorded layers with other operands."""
