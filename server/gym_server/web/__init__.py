"""The hub's dashboard: what the database holds as pages, live while the hub runs, and read-only when it is stopped.

Neighbours: imports accounts, federation, ledger, privacy, rewards, rounds, store, strategy; imported by cli.
"""
