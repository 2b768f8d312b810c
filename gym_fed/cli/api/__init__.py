"""`gym api` and `gym api keys`.

Neighbours: imports chat, default_command, models; imported by batch, main.
"""
