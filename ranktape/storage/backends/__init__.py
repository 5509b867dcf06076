"""Where can a run lie, and what is asked of such a place?"""
