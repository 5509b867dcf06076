"""Computes the products of recorded layers again, with other operands."""
