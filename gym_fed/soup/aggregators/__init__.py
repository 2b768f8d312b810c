"""One file is one aggregation rule; a file dropped in here is a member of the registry."""
