"""PPO: the algorithm (``ppo``), GAE, the clipped objective, the critic, and their trainer. It may import ``grpo``."""
