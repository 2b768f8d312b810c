"""Algorithms that learn from preferred and rejected answers. This family imports no other."""
