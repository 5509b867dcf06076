"""Say what the modules and functions of each framework are: one row for each role."""
