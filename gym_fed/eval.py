"""Another name for ``gym_fed.evaluation``, with the same public names."""

from gym_fed import evaluation

__all__ = list(evaluation.__all__)
__getattr__ = evaluation.__getattr__
