"""Backup, restore, check and clean-up of a hub's folder.

Neighbours: imports evaluations, federation, ledger, rounds, store; imported by cli.
"""
