"""`gym models`, and helpers of commands that load models."""
