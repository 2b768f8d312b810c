"""The contributor's copy of a hub's ledger, held against what the hub says: heads, receipts, rewards."""
