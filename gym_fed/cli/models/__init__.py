"""`gym models`, and what the commands that load models share."""
