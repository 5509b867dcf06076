"""Writes the text, log and plots that the older sweep tool wrote."""
