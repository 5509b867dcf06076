"""Recipes: how each operand of each product of a layer is quantised."""
