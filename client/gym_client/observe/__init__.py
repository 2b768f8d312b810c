"""What an agent shows its own contributor's monitoring: metrics on this machine, and spans of its tasks."""
