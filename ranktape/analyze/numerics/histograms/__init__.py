"""Gives how often each value occurs in a tensor, alone and beside the largest value of its block."""
