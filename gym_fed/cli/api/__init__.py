"""`gym api` and `gym api keys`.

Neighbours: imports none; imported by batch, main.
"""
