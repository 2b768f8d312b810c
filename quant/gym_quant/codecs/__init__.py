"""One file is one codec; a file dropped in here is a member of the registry."""
