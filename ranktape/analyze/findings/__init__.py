"""What is wrong in a run, and where?"""
