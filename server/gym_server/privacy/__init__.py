"""Differential privacy and secure aggregation on the hub.

Neighbours: imports federation, rounds, store, strategy; imported by app, cli, rounds, rpc, strategy, web.
"""
