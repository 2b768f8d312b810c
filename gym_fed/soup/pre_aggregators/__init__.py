"""One file is one step before aggregation; a file dropped in here is a member of the registry."""
