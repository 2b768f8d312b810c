"""The ledger: append-only, hash-chained, under signed heads. Everything that was decided, in its order."""
