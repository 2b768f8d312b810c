"""The gateway's side of vLLM: its process, an HTTP client, and the queue in front of it."""
