"""What is to be captured, and how do a command line, the environment, a file and Python say it?"""
