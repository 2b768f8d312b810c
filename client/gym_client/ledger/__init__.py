"""The contributor's copy of a hub's ledger: receipts, rewards, and hubs that were restored.

Neighbours: imports hub, identity; imported by agent, cli, variants.
"""
