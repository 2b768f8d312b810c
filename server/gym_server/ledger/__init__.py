"""The ledger: an append-only, hash-chained log of all decisions in order, under signed heads."""
