"""The ledger: append-only, hash-chained, signed. Everything that was decided, in the order it was decided."""

from gym_server.ledger.chain import GENESIS_HASH, Entry, Ledger, verify_entry

__all__ = ["GENESIS_HASH", "Entry", "Ledger", "verify_entry"]
