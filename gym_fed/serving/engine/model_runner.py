"""Runs the forward of a step, and finds the request that breaks one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.serving.engine.stats import Counters
    from gym_fed.serving.forward.chunk import Chunk
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

log = logging.getLogger("gym_fed")


class ModelRunner:
    """Forwards of one model.

    Args:
        model: The base, ready for multi-variant steps.
        counters: Failed steps are counted there.
    """

    def __init__(self, model: MultiVariantModel, counters: Counters) -> None:
        self._model = model
        self._counters = counters

    def forward(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        """Logits of the chunks that want them, and the errors of failed chunks, by place (their logits are 0).

        A failed step leaves the caches unchanged. So each chunk is tried alone, and only the cause fails.
        """
        counters = self._counters
        try:
            logits = self._model.step(chunks)
        except Exception as error:
            if len(chunks) > 1:
                log.warning("a step of %d requests failed (%r); each is tried alone", len(chunks), error)
                return self._forward_alone(chunks)
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            if isinstance(error, GymError):
                return None, {0: error}
            log.exception("a step failed")
            return None, {0: internal_error("the step", error)}
        counters.failed_in_a_row = 0
        return logits, {}

    def _forward_alone(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        found: list[Any] = []
        failures: dict[int, GymError] = {}
        for place, chunk in enumerate(chunks):
            logits, failed = self.forward([chunk])
            failures.update((place, error) for error in failed.values())
            found.append(logits)
        alike = next((one for one in found if one is not None and len(one)), None)
        if alike is None:
            return None, failures
        return torch.cat(
            [
                alike.new_zeros(chunk.rows, alike.shape[1]) if one is None else one
                for chunk, one in zip(chunks, found, strict=True)
            ]
        ), failures


def internal_error(what: str, error: Exception) -> GymError:
    """For an error that nobody foresaw; the caller has logged it."""
    return GymError(ErrorCode.INTERNAL, f"{what} failed: {error!r}", "the log has the trace; try again")
