"""Evaluations that a hub runs: of every soup before its commit, and of versions on request."""
