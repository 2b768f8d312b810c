"""Personal variants at a hub: push, pull, list, remove.

Neighbours: imports hub, identity, ledger; imported by none.
"""
