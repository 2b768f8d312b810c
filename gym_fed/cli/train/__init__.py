"""`gym train` and `gym tune`.

Neighbours: imports models; imported by batch, main, variant.
"""
