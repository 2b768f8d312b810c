"""`gym delta`."""
