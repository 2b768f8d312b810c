"""Checks of this repository's wording and pages, run by `make lint` as ``python -m tools.checks``."""
