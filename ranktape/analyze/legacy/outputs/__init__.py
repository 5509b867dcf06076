"""Writes the text, log and plots that the legacy sweep tool wrote."""
