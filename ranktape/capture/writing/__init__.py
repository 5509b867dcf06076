"""Store what was staged, whole, from every rank."""
