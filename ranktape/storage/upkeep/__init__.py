"""Is a run whole, and how is it kept, mended, moved, found and watched?"""
