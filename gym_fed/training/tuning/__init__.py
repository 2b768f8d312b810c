"""Which weights are trained, one method a file: file name = registry name = value of ``finetuning``."""

from gym_fed.training.tuning._describe import count_trainable, describe_trainable
from gym_fed.training.tuning.registry import get_tuning, tuning_names

__all__ = ["count_trainable", "describe_trainable", "get_tuning", "tuning_names"]
