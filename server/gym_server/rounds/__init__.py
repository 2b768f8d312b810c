"""A round from its first task to a committed version: admission, queue, merge, replay.

Neighbours: imports federation, ledger, privacy, rewards, store; imported by accounts, app, backup, cli,
federation, privacy, rewards, rpc, strategy.
"""
