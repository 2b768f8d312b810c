"""The interface of pre-aggregators: linear combinations of the updates before the aggregator."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from gym_fed.soup.gram import CombinationWeights, GramMatrix
from gym_fed.soup.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


class PreAggregator(Rule):
    """A step before aggregation, composable with every aggregator and with other steps.

    To add one, put a file with a subclass into ``gym_fed/soup/pre_aggregators``, named like the step.
    """

    @abstractmethod
    def mix(self, gram: GramMatrix) -> CombinationWeights:
        """Combine the updates, given their inner products.

        Raises:
            GymError: ``CONFIG_INVALID`` for a round that is too small for the step.
        """

    def rows(self, count: int) -> int:
        """Return the number of output vectors for ``count`` updates; by default ``count``.

        Raises:
            GymError: ``CONFIG_INVALID`` if ``count`` updates are too few for the step.
        """
        return count

    def apply(self, updates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the step to updates in memory.

        Args:
            updates: ``[n, d]`` float32 or float64.
            weights: ``[n]``, positive.

        Returns:
            ``[m, d]`` float64 vectors and their ``[m]`` float64 weights.
        """
        combination = self.mix(GramMatrix.of(updates, weights))
        return combination.applied(updates), combination.weights
