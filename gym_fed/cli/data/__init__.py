"""`gym data`.

Neighbours: imports configs; imported by main, variant.
"""
