"""The `gym` command.

Neighbours: imports config, console, data, delta, doctor, errors, evaluation, files, identity, kinds, models,
personalization, quantization, serving, soup, tables, text, tracking, training; imported by none.
"""
