"""Pre-aggregators. Each file is one, and adding a file registers it."""
