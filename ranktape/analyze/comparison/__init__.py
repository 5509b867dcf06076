"""How far are two tensors apart, and which tensor of one side belongs to which of the other?"""
