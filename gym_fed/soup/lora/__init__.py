"""Soups of LoRA factors that stay factors.

Neighbours: imports aggregator, linalg, stacks; imported by merging, methods, private, stacks.
"""
