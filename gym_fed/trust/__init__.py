"""Identities, signatures, ledger entries and wire messages."""
