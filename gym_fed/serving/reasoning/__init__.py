"""Thoughts of reasoning models: parsers for model families, and their detection from the chat template."""
