"""`gym variant`."""
