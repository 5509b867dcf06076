"""Gives metrics of records and samples, alone or in groups, and what of them is beyond limits."""
