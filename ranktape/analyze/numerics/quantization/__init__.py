"""Quantisation of tensors to low-precision formats, with scales and losses."""
