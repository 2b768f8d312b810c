"""The optimisers, one a file or a name of transformers': value of ``optimizer``."""

from gym_fed.training.optimizers.registry import get_optimizer, optimizer_names

__all__ = ["get_optimizer", "optimizer_names"]
