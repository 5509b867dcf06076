"""Sweeps over the scales of a tensor and measures the errors of each."""
