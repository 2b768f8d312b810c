"""`gym chat`.

Neighbours: imports models, variant; imported by api, batch, main.
"""
