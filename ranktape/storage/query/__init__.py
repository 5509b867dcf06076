"""Selects rows of a catalogue by filters and expressions."""
