"""The connection to one hub: calls, streams, transfers and signed ledger heads."""
