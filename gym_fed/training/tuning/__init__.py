"""Which weights are trained, one method a file: file name = registry name = value of ``finetuning``."""

from gym_fed.training.tuning.registry import get_tuning, tuning_names

__all__ = ["get_tuning", "tuning_names"]
