"""Terminal recordings for docs/: the scripts of tests/newcomer/ in a new environment."""
