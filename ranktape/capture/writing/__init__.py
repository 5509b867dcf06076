"""Stores staged tensors, and sees that iterations are complete on all ranks."""
