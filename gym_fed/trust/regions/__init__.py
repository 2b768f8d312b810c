"""A hub that is a contributor of another hub: what the two exchange, and the links between their ledgers."""
