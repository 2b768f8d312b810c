"""The base model of a federation, where this machine lacks it: offered, fetched, checked and kept.

Neighbours: imports hub, identity; imported by agent, cli.
"""
