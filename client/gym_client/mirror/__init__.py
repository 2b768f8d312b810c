"""Follow a hub, and keep a verified copy of what is public."""
