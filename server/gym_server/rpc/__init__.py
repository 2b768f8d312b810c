"""The gRPC face of the hub: authentication, limits, streams, transfers.

Neighbours: imports accounts, base, federation, privacy, rewards, rounds, store, traffic, variants; imported
by cli.
"""
