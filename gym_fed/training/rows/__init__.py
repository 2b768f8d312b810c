"""The rows of a run as batches: sources, packing, lengths, batch sizes, templates.

Neighbours: imports algorithms, model, processes, run, trl_glue, vision; imported by active_features,
algorithms, defaults, evaluating, run, trainer, trl_glue.
"""
