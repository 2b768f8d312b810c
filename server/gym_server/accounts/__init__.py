"""Who may speak to the hub: enrolment, invites, keys, nodes, sessions.

Neighbours: imports federation, ledger, rewards, rounds, store; imported by cli, federation, rpc, variants,
web.
"""
