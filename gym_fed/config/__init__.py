"""Pydantic schemas of every YAML file, with errors that name file, line and column. No ML imports here.

Neighbours: imports data, errors, identity, kinds, models, renamed, text; imported by cli, data, delta,
evaluation, export, identity, personalization, planning, privacy, quantization, serving, soup, tracking,
training.
"""
