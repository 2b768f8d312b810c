"""The safety probe: refusal margin, attacks, over-refusal, and what is left after a harmful fine-tune."""
