"""`gym data`.

Neighbours: imports completion, configs; imported by main.
"""
