"""Compares tensors: how far two are apart, and which of one side belongs to which of the other."""
