"""`gym train` and `gym tune`.

Neighbours: imports models, next_command; imported by batch, evaluation, main, variant.
"""
