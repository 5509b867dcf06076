"""Hooks that record modules and functions while an iteration is captured, without changing what they compute."""
