"""Aggregation rules. Each file is one rule, and adding a file registers it."""
