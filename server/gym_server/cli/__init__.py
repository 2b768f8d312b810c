"""The `gym-server` command line: one module per group of commands."""
