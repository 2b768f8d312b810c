"""`gym soup`.

Neighbours: imports none; imported by main.
"""
