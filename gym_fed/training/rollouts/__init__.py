"""Generate the policy's answers with a vLLM next to the trainer, also ahead of their step."""
