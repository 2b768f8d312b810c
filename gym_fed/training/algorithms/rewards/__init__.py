"""Algorithms that learn from rewards for generated answers: GRPO, GSPO, RLOO and PPO."""
