"""What would a capture cost, before it is made?"""
