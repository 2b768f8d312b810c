"""Fine-tuning of models that read images.

Neighbours: imports run, trl_glue; imported by algorithms, defaults, model, rows, run, trainer, tuning.
"""
