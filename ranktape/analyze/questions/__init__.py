"""The questions that can be asked of a run: each is a function here, a command, and later a section of the report.

They live one folder down because a function and a module of one name (`overflow`) cannot both be attributes of
`ranktape.analyze`: whichever is imported last would hide the other.
"""
