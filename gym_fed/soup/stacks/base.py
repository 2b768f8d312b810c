"""What a round does with one tensor of all its updates: inner products, then the merge itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.config.soup import MERGE_VERSION
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture


class Stack(ABC):
    """One tensor of n updates; an update that leaves it out counts as zero.

    Args:
        name: The tensor.
        updates: Open deltas, at least one of which holds it.
        shape: Its shape; it is seen as ``[rows, cols]``, its last dimension against all others.
        version: Of merging (``SoupRecipe.merge_version``).
    """

    def __init__(
        self,
        name: str,
        updates: Sequence[DeltaFile],
        shape: tuple[int, ...],
        version: int = MERGE_VERSION,
    ) -> None:
        self.name = name
        self.updates = updates
        self.shape = shape
        self.version = version
        self.rows, self.cols = as_matrix(shape)

    @abstractmethod
    def products(self, factors: Tensor) -> Tensor:
        """``[n, n]`` float64 inner products of the updates' tensors.

        Args:
            factors: ``[n]`` float64 powers of two near one over each update's norm; the products are those of the
                updates times these, so that what a liar sends can not overflow.
        """

    @abstractmethod
    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        """Fill ``target`` ``[rows, cols]`` float32 with ``rule.combine`` of what ``plan`` makes of the updates."""

    def release(self) -> None:
        """Give the mapped pages of the tensor back; they are read again when they are needed."""
        for update in self.updates:
            if self.name in update:
                update.release(self.name)
