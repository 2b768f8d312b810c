"""The contributor's copy of a hub's ledger: receipts, rewards, and hubs that were restored."""
