"""`gym chat`.

Neighbours: imports models; imported by api, batch, main.
"""
