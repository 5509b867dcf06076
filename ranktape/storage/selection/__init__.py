"""Which rows of a catalogue does a filter or an expression mean?"""
