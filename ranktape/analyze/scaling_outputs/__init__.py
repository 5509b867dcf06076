"""Write what a sweep found of each tensor as files: figures, pictures, and a log of what was done."""
