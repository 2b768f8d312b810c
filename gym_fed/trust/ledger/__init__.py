"""What anyone needs to check a hub's ledger: hashes of entries, signed heads, and proofs of what is under a head."""
