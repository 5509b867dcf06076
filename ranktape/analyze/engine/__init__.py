"""Reads records in batches, in several processes or on a cluster, and caches the counts."""
