"""Parse the thoughts of reasoning models, with parsers for model families that are detected from chat templates."""
