"""Generate the policy's answers with a vLLM next to the trainer, optionally ahead of the step that uses them."""
