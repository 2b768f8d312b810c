"""The ledger: an append-only, hash-chained log of all decisions, with signed heads."""
