"""Calls to one hub: the channel, streams, uploads and downloads, and its signed heads.

Neighbours: imports display, identity; imported by agent, app, cli, ledger, privacy, variants.
"""
