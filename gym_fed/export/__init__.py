"""Models as other programs read them: written, read back in a fresh process, and compared with their source.

Neighbours: imports config, delta, errors, files, json_files, kinds, modeling, models, training; imported by
cli, registry, training.
"""
