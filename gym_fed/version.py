"""The version of gym-fed; pyproject.toml has the same."""

__version__ = "0.2.0"
