"""One file is one format of base linears; a file dropped in here is a member of the registry."""
