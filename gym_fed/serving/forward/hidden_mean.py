"""The pooling of an embedding: the mean of a text's last hidden states, collected chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class HiddenMean:
    """Mean of the last hidden states of a text whose prefill comes in chunks."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Add the states of the next tokens: ``[tokens, hidden]``."""
        found = states.float().sum(dim=0)
        self._sum = found if self._sum is None else self._sum + found

    def unit(self) -> Tensor:
        """The mean scaled to length 1, for which the sum suffices: ``[hidden] float32``."""
        assert self._sum is not None
        found: Tensor = self._sum / self._sum.norm().clamp_min(1e-12)
        return found
