"""Follows the passes, microbatches, calls and iterations of a training."""
