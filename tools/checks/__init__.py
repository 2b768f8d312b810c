"""What no linter checks of this repository's words and pages; `make lint` runs it as ``python -m tools.checks``."""
