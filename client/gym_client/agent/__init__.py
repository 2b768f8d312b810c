"""Tasks of a hub, done on this machine: what is loaded, trained, encoded and sent.

Neighbours: imports app, base, display, hub, identity, ledger, privacy; imported by app, cli, privacy.
"""
