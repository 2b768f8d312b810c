"""What several test folders share: real hubs, real contributors, real processes."""
