"""Calls to one hub: the channel, streams, uploads and downloads, and its signed heads.

Neighbours: imports display, identity; imported by agent, app, base, cli, ledger, privacy, variants.
"""
