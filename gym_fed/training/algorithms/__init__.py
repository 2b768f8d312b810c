"""The training algorithms, one file each: file name = registry name = YAML value. Dropping a file in registers it."""

from gym_fed.training.algorithms.registry import algorithm_names, get_algorithm

__all__ = ["algorithm_names", "get_algorithm"]
