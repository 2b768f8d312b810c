"""The model of a run: loaded, made from nothing, held in few bits, saved.

Neighbours: imports algorithms, features, processes, run, tuning, vision; imported by algorithms, defaults,
evaluating, rows, run, trainer, trl_glue, tuning.
"""
