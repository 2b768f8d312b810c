"""Deltas (tuned - base): file format, encoding and application."""
