"""Splits tensors into plain ones, and finds the placement of shards."""
