"""Several processes of one run: launched, agreed with, and the model split among them.

Neighbours: imports run; imported by algorithms, defaults, evaluating, model, recipe, rows, run, trainer,
trl_glue.
"""
