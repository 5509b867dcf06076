"""How does what was staged get into the store, whole, from every rank?"""
