"""State on disk: one SQL database and one content-addressed object store.

Neighbours: imports federation; imported by accounts, backup, cli, clock, evaluations, federation, ledger,
privacy, rewards, rounds, rpc, strategy, variants, web.
"""
