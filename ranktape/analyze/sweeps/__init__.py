"""What does a tensor lose at every scale that is tried?"""
