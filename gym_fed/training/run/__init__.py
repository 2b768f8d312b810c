"""One run from its first step to its result: folder, loop, hooks, checks, recovery.

Neighbours: imports active_features, algorithms, model, private, processes, rows, vision; imported by
algorithms, defaults, evaluating, features, loops, model, optimizers, private, processes, rows, search,
trainer, trl_glue, tuning, vision.
"""
