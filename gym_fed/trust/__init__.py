"""Identities, signatures, the hub's ledger and wire messages."""
