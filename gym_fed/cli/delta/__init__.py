"""`gym delta`.

Neighbours: imports none; imported by main.
"""
