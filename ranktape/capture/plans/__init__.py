"""Tells what a capture would cost, before it is made."""
