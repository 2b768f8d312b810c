"""DeltaSoup: robust aggregators and the recipes that use them.

Neighbours: imports config, delta, errors, identity, kinds, lazy_torch, modeling, models, privacy, text;
imported by cli, evaluation, quantization, training.
"""
