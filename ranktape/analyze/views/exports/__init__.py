"""Gives what is known of a selection to the programs that people look at all day, in their own forms."""
