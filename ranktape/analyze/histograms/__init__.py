"""How often does each value occur in a tensor, alone and with the largest value of its block?"""
