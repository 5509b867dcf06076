"""The roles of modules and functions of each framework, one row for each role."""
