"""The ledger: append-only, hash-chained, under signed heads. Everything that was decided, in its order."""

from gym_fed.ledger.entries import GENESIS_HASH, Entry
from gym_server.ledger.chain import Ledger

__all__ = ["GENESIS_HASH", "Entry", "Ledger"]
