"""The side of the gateway that drives vLLM: its process, its HTTP client, and the queue in front of it."""
