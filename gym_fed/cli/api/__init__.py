"""`gym api` and `gym api keys`.

Neighbours: imports chat, completion, default_command, models; imported by batch, main.
"""
