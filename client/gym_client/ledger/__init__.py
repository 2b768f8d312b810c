"""The contributor's side of a hub's ledger: a copy, receipts, rewards, and restored hubs."""
