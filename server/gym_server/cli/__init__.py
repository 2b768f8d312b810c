"""The `gym-server` commands, one module per group, and their output."""
