"""`gym api` and `gym api keys`.

Neighbours: imports chat, models; imported by batch, main.
"""
