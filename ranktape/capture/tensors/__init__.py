"""Take tensors apart, and find where they lie in those that span ranks."""
