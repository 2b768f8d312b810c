"""Thoughts of reasoning models: parsers per family, and their detection from the chat template."""
