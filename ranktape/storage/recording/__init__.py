"""Writes a run: the lease, the attempt, what one rank stores and commits."""
