"""The home folder, its keys, and which hubs are trusted at which address.

Neighbours: imports none; imported by agent, app, base, cli, hub, ledger, privacy, variants.
"""
