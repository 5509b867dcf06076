"""Gives the summary of a tensor that most questions are answered from, and estimates of its quantiles."""
