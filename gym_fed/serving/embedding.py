"""A text as a vector: the mean of its hidden states, and the caller's end of one that is on its way."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor


class HiddenMean:
    """Mean of the last hidden states of a text that is read in pieces."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Of the next tokens: ``[tokens, hidden]``."""
        found = states.float().sum(dim=0)
        self._sum = found if self._sum is None else self._sum + found

    def unit(self) -> Tensor:
        """The mean scaled to length 1 (so that the sum will do): ``[hidden] float32``."""
        assert self._sum is not None
        found: Tensor = self._sum / self._sum.norm().clamp_min(1e-12)
        return found


class PendingEmbedding:
    """One embedding on its way: ``[hidden] float32``, the mean of the text's last hidden states, of length 1.

    Args:
        future: Set by the engine; whoever cancels it calls the work off.
    """

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Call it off: within one step its place is free. Safe to call at any time."""
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for it.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (it goes on); ``UNAVAILABLE``
                when it was called off.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, f"no embedding within {timeout} s", "wait longer"
            ) from None
        except CancelledError:
            raise _called_off() from None

    async def result_async(self) -> Tensor:
        """As ``result``, without holding up the event loop. Whoever stops awaiting it calls the embedding off."""
        waiting = asyncio.wrap_future(self._future)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.cancel()
                raise
            raise _called_off() from None


def _called_off() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the embedding was called off", "ask again")
