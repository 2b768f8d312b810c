"""`gym-client`: one module a group of commands, with its questions and tables.

Neighbours: imports agent, app, base, display, hub, identity, ledger, privacy; imported by none.
"""
