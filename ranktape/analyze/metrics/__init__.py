"""How much of each record is beyond the limits of its dtype, or of a format, with and without a scale?"""
