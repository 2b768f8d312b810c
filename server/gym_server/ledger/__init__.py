"""The ledger: append-only, hash-chained, under signed heads. Everything that was decided, in its order.

Neighbours: imports federation, rewards, rounds, store; imported by accounts, backup, cli, evaluations,
federation, rewards, rounds, variants, web.
"""
