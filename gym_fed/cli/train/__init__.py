"""`gym train` and `gym tune`.

Neighbours: imports data, models; imported by batch, evaluation, main, variant.
"""
