"""The settings of a capture, from a command line, the environment, a file and Python."""
