"""`gym delta`.

Neighbours: imports completion; imported by main.
"""
