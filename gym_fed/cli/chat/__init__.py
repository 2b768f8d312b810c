"""`gym chat`.

Neighbours: imports variant; imported by main.
"""
