"""`gym api` and `gym api keys`.

Neighbours: imports models; imported by batch, main.
"""
