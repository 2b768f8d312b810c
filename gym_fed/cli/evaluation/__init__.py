"""`gym eval`."""
