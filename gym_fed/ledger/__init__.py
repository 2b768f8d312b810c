"""What anyone needs to check a hub's ledger: hashes of entries, signed heads, and proofs of what is under a head."""

from gym_fed.ledger.entries import GENESIS_HASH, Chain, Entry
from gym_fed.ledger.export import LedgerCheck, verify_file
from gym_fed.ledger.heads import EntryProof, Head, SignedHead, check_fork, contradiction, fork_document
from gym_fed.ledger.merkle import Frontier, Tree, verify_inclusion
from gym_fed.ledger.restored import HubRestored, Restored, SignedRestored
from gym_fed.ledger.seals import SEALED, seal

__all__ = [
    "GENESIS_HASH",
    "SEALED",
    "Chain",
    "Entry",
    "EntryProof",
    "Frontier",
    "Head",
    "HubRestored",
    "LedgerCheck",
    "Restored",
    "SignedHead",
    "SignedRestored",
    "Tree",
    "check_fork",
    "contradiction",
    "fork_document",
    "seal",
    "verify_file",
    "verify_inclusion",
]
