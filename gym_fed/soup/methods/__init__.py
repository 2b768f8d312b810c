"""Merge methods. Each file is one method, and adding a file registers it."""
