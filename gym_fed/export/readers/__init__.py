"""Readers of exports: one module per library, run in a separate process."""
