"""The questions about a run. Each is a function and a command.

They are in a subpackage because a function and a module of the same name (`overflow`) cannot both be attributes of
`ranktape.analyze`: the one that is imported last would hide the other.
"""
