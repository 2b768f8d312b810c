"""Formats of base linears. Each file is one format, and adding a file registers it."""
