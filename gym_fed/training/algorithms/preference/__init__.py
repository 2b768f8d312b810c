"""Algorithms that learn from preferred and rejected answers. They import no other family."""
