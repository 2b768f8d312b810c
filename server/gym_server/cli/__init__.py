"""`gym-server`: one module a group of commands, and what the coordinator sees.

Neighbours: imports accounts, backup, base, certificate, clock_watch, evaluations, federation, ledger,
privacy, rewards, rounds, rpc, store, strategy, web; imported by none.
"""
