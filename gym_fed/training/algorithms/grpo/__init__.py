"""GRPO, GSPO and RLOO, which compare answers to one prompt; and the generation of answers, which PPO shares."""
