"""Identities and signatures, the ledger's entries, and the messages of the wire."""
