"""LLaMA-Factory's YAML files: told from our own, translated, and what has no counterpart is named with its line.

Neighbours: imports train, yaml; imported by none.
"""
