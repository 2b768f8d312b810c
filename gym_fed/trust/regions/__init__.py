"""Regional hubs, which contribute to a root hub: the data that they exchange, and the links between their ledgers."""
