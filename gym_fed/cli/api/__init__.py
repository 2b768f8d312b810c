"""`gym api` and `gym api keys`."""
