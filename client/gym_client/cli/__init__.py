"""The `gym-client` command line: one module per group of commands."""
