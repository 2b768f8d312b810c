"""`gym train` and `gym tune`.

Neighbours: imports none; imported by batch, main, variant.
"""
