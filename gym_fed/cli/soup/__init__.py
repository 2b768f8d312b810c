"""`gym soup`.

Neighbours: imports completion; imported by main.
"""
