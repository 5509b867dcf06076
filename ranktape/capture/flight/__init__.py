"""Hold the last iterations, and store them on all ranks when something happens on one."""
