"""`gym chat`.

Neighbours: imports models, variant; imported by main.
"""
