"""Schemas of `gym train` and `gym tune`: model, data, method and run."""
