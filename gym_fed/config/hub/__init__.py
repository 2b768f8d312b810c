"""Schemas of the hub's YAML and of the tasks that it sends.

Neighbours: imports algorithms, delta, schema, train; imported by train.
"""
