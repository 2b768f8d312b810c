"""Hubs that contribute to another hub: the data that the two exchange, and the links between their ledgers."""
