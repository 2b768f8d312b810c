"""Evaluations on the hub: of every soup before its commit, and of versions on request.

Neighbours: imports federation, ledger, rounds, store; imported by backup, cli, federation, rounds, strategy.
"""
