"""`gym data`.

Neighbours: imports none; imported by main, variant.
"""
