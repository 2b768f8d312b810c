"""`gym chat`.

Neighbours: imports completion, models, next_command; imported by api, batch, main.
"""
