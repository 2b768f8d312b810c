"""The gateway's side of vLLM: the vLLM process, an HTTP client, and the queue in front of it."""
