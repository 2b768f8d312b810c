"""`gym models`, and what the commands that load models share.

Neighbours: imports none; imported by api, batch, chat, evaluation, export, main, train, variant.
"""
