"""`gym chat`.

Neighbours: imports completion, models, next_command, waiting; imported by api, batch, main.
"""
