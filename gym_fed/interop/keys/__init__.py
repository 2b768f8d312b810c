"""Aliases of config keys and values in other tools, one file per schema."""
