"""Verification of a hub's ledger: entry hashes, signed heads and inclusion proofs."""
