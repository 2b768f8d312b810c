"""A round from its first task to a committed version: admission, queue, merge, replay.

Neighbours: imports evaluations, federation, ledger, privacy, rewards, store; imported by accounts, app,
backup, cli, evaluations, federation, ledger, privacy, rewards, rpc, strategy, web.
"""
