"""Recipes: what each operand of each product of a layer is quantised to."""
