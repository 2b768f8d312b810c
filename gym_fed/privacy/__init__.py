"""Differential privacy: exact noise from a cryptographic source, clips of known sensitivity, accounts of both.

Neighbours: imports config, delta, errors, files, identity, lazy_torch, text; imported by soup, training.
"""
