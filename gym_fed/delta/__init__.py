"""Delta = tuned - base: file format, diff, apply, digest.

Neighbours: imports config, errors, files, identity, json_files, modeling, portable; imported by cli,
evaluation, export, personalization, privacy, quantization, registry, serving, soup, training.
"""
