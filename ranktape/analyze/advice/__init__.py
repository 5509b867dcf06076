"""Which scale, and which format, should be used, and what has to be known about it?"""
