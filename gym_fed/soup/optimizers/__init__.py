"""One file is one server optimiser; a file dropped in here is a member of the registry."""
