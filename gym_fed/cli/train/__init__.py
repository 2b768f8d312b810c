"""`gym train` and `gym tune`.

Neighbours: imports models, next_command, waiting; imported by batch, evaluation, main, variant.
"""
