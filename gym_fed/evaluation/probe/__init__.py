"""The safety probe: refusal margin, attacks, over-refusal, and resistance to a harmful fine-tune."""
