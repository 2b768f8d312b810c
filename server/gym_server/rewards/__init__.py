"""What a round was worth to the network, and who is credited with it."""

from gym_server.rewards.split import reward

__all__ = ["reward"]
