"""Brings tensors from the training thread to the writer process."""
