"""`gym data`.

Neighbours: imports completion, configs, waiting; imported by main.
"""
