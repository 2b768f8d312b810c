"""`gym data`.

Neighbours: imports configs; imported by main, train, variant.
"""
