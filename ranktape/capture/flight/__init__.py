"""The flight recorder: holds the last iterations, and stores them on all ranks when an event happens on one."""
