"""A run's records: selected, read, put together from all ranks, and shown."""
