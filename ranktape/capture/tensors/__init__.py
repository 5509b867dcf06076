"""What is a tensor made of, where does it lie in one that spans ranks, and what are its dimensions?"""
