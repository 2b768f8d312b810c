"""What a newcomer sees: the scripts of tests/newcomer/ in a new environment, recorded for docs/."""
