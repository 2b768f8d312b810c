"""Fuzzing of every parser of untrusted data."""
