"""What do the figures of a run look like: which plots are there, how are they drawn, and where do they go?"""
