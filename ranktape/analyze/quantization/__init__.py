"""What does a tensor become in a low-precision format, with which scales?"""
