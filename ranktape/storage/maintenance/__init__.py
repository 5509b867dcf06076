"""Checks, repairs, copies, prunes, lists and watches runs."""
