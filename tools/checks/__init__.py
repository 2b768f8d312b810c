"""Checks of this repository's words and pages that no linter has. `make lint` runs ``python -m tools.checks``."""
