"""Schemas of `gym train` and `gym tune`: model, data, method, run.

Neighbours: imports algorithms, delta, hub, schema; imported by algorithms, hub, llamafactory, predict,
serving.
"""
