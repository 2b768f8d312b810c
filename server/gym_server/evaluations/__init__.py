"""Evaluations on the hub: of every soup before its commit, and of versions on request."""
