"""How are the values of a digest distributed: in bins, against a normal distribution, by exponent, beside another?"""
