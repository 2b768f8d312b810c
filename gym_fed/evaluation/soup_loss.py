"""Held-out loss of a base with some combination of deltas on it: how soups are compared before one is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.soup.model_merging import combined


class SoupLoss:
    """Loss of ``base + sum_i c_i delta_i`` on held-out rows.

    Args:
        model: The base; it is changed during a call and back, bit for bit, after it.
        tokenizer: Its tokenizer.
        updates: Open deltas of that base.
        rows: As for ``heldout_loss``.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, updates: Sequence[DeltaFile], rows: Sequence[dict[str, Any]]
    ) -> None:
        self._model, self._tokenizer, self._updates, self._rows = model, tokenizer, updates, rows

    def __call__(self, coefficients: Tensor) -> float:
        """``[n]`` float64 coefficients to mean nats per token; inf or NaN for a broken model."""
        with _applied(self._model, self._updates, coefficients):
            return heldout_loss(self._model, self._tokenizer, self._rows)

    def of_base(self) -> float:
        """The base's own loss."""
        return heldout_loss(self._model, self._tokenizer, self._rows)


@contextmanager
def _applied(model: nn.Module, updates: Sequence[DeltaFile], coefficients: Tensor) -> Iterator[None]:
    tensors = model_tensors(model)
    inside = [i for i, coefficient in enumerate(coefficients.tolist()) if coefficient]
    chosen, own = [updates[i] for i in inside], coefficients[inside]
    kept: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name in sorted({name for update in chosen for name in update.names}):
                target = tensors[name]
                kept[name] = target.clone()
                change = combined(chosen, own, name, tuple(target.shape)).to(target.device)
                target.copy_(target.float() + change)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)
