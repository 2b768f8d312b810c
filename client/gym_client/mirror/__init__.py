"""A mirror: follow a hub and keep a verified copy of its public objects."""
