"""`gym eval`.

Neighbours: imports models; imported by main.
"""
