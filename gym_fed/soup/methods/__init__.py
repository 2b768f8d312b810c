"""One file is one merge method; a file dropped in here is a member of the registry."""
