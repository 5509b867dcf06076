"""How are modules and functions seen while an iteration is captured, without changing what they compute?"""
