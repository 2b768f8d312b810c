"""The HTTP server of ``gym api``: keys, errors, metrics and streams around ``gym_fed.serving.openai``."""
