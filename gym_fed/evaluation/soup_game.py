"""The updates of a round as a cooperative game: the effect of each coalition's soup on the held-out loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.encoding import encode_rows
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.loss import RowLosses, batch_losses, heldout_row_losses
from gym_fed.soup.contribution import Coalition, Vector
from gym_fed.soup.merging import inner_products
from gym_fed.soup.stacks import stacks_of

WORST = 10.0
"""Bound in nats on the loss increase of a coalition, for example one that breaks the model."""

_BATCH_SIZE = 32
KEPT_BYTES = 64 << 20
"""Maximum size in bytes of decoded updates that are kept in memory; beyond it, updates are decoded on each use."""


class SoupGame:
    """``v(S) = loss(model) - loss(model + sum_{i in S} c_i u_i)``; see ``gym_fed.soup.contribution``.

    Updates in any codec are decoded one tensor at a time. In addition to the model, memory contains a copy of the
    tensors in the updates and a float32 sum of the last coalition. A larger coalition only adds to that sum and
    nothing is subtracted, so rounding errors are those of adding each member once.

    Args:
        model: The model that the updates were made for. It is changed during a call and restored bit for bit
            afterwards.
        updates: Open deltas of that model; at least one.
        rows: Held-out rows, as for ``heldout_loss``.
        coefficients: ``[n]`` coefficient of each update in the soup of all updates; see ``round_coefficients``.
        max_length: Maximum number of tokens of a row.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        updates: Sequence[DeltaFile],
        rows: Sequence[dict[str, Any]],
        coefficients: Sequence[float],
        *,
        max_length: int = 256,
    ) -> None:
        if not updates or len(updates) != len(coefficients):
            raise GymError(
                ErrorCode.USAGE,
                f"{counted(len(updates), 'update')} but {counted(len(coefficients), 'coefficient')}",
            )
        self._model, self._tokenizer, self._updates = model, tokenizer, updates
        self._rows = encode_rows(tokenizer, rows, max_length=max_length)
        self._coefficients = [float(c) for c in coefficients]
        self._max_length = max_length
        self._names = sorted({name for update in updates for name in update.names})
        tensors = model_tensors(model)
        self._check(tensors)
        self._kept = {name: tensors[name].clone() for name in self._names}
        self._sum: dict[str, Tensor] = {}
        self._in_sum: Coalition = frozenset()
        size = 4 * sum(update.num_weights for update in updates)
        self._decoded: dict[tuple[int, str], Tensor] | None = {} if size <= KEPT_BYTES else None
        self._base_losses: RowLosses | None = None
        self._chance: Vector | None = None

    @property
    def n(self) -> int:
        return len(self._updates)

    def base_loss(self) -> float:
        """Return the held-out loss of the model itself in nats per token.

        Raises:
            GymError: ``DATA_INVALID`` if it is not finite.
        """
        return self._before().mean

    def _before(self) -> RowLosses:
        if self._base_losses is None:
            losses = self._losses()
            if not math.isfinite(losses.mean):
                raise GymError(
                    ErrorCode.DATA_INVALID, f"the held-out loss of the model itself is {losses.mean}"
                )
            self._base_losses = losses
        return self._base_losses

    @property
    def block_weights(self) -> Vector:
        """The fraction of held-out tokens in each block, ``[k]``."""
        return self._before().block_weights

    def value(self, coalition: Coalition) -> float:
        """Return the reduction of the loss by the coalition's soup in nats; at least ``-WORST``."""
        return float(self.parts(coalition).sum())

    def parts(self, coalition: Coalition) -> Vector:
        """Return the contribution of each block of held-out rows to ``value``, ``[k]``."""
        before = self._before()
        if not coalition:
            return np.zeros_like(before.block_weights)
        with self._with_step(self._summed(coalition)):
            after = self._losses()
        gain = before.gain_to(after)
        if not (np.isfinite(gain).all() and gain.sum() > -WORST):
            gain = -WORST * before.block_weights
        return gain

    def slopes(self, shares: Vector) -> Vector:
        """Return ``-c_i <gradient at model + sum_j shares_j c_j u_j, u_i>`` by block of held-out rows, ``[n, k]``."""
        step = {name: self._zeros(name) for name in self._names}
        for i, share in enumerate(shares.tolist()):
            self._add(step, i, share)
        tokens, blocks = float(self._before().counts.sum()), len(self.block_weights)
        slopes, spread = np.zeros((self.n, blocks)), np.zeros(self.n)
        gradients = {name: self._zeros(name) for name in self._names}
        with self._with_step(step):
            del step
            for k in range(blocks):
                gradient = self._gradient(self._rows[k::blocks], tokens)
                for name in self._names:
                    slope = gradient.pop(name)
                    gradients[name] += slope
                    slope = slope.to("cpu", torch.float64)
                    for i, update in enumerate(self._updates):
                        if name in update:
                            slopes[i, k] -= self._coefficients[i] * float(
                                (slope * self._change(i, name)).sum()
                            )
        for name in self._names:
            steepness = float(gradients.pop(name).double().square().sum())
            for i, (update, coefficient) in enumerate(zip(self._updates, self._coefficients, strict=True)):
                if name in update:
                    spread[i] += (
                        coefficient**2 * steepness * float(self._change(i, name).double().square().mean())
                    )
        self._chance = np.sqrt(spread)
        return slopes

    def chance(self) -> Vector:
        """Return the standard deviation of ``slopes`` for updates with random directions, ``[n]``.

        It uses the last gradient or, if none was computed yet, the one at half of the step.
        """
        if self._chance is None:
            self.slopes(np.full(self.n, 0.5))
        assert self._chance is not None
        return self._chance

    def gram(self) -> Vector:
        """Return the inner products of the updates as sent, ``[n, n]``; popcounts for signs."""
        spec = BaseSpec("", "", {name: tuple(tensor.shape) for name, tensor in self._kept.items()})
        norms = [update.norm() for update in self._updates]
        products: Vector = inner_products(stacks_of(self._updates, spec), norms).numpy()
        return products

    def _losses(self) -> RowLosses:
        return heldout_row_losses(self._model, self._tokenizer, self._rows, max_length=self._max_length)

    def _gradient(self, rows: Sequence[dict[str, Any]], tokens: float) -> dict[str, Tensor]:
        """Return the gradient of the rows' summed loss over ``tokens`` by name, restoring the model's gradients and
        flags."""
        parameters = dict(self._model.named_parameters())
        before = {name: (p.requires_grad, p.grad) for name, p in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.requires_grad_(name in self._kept)
                parameter.grad = None
            with torch.enable_grad():
                for loss, _ in batch_losses(
                    self._model, self._tokenizer, rows, self._max_length, _BATCH_SIZE
                ):
                    loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: parameters[name].grad for name in self._names}
            return {
                name: self._zeros(name) if slope is None else slope.float() / tokens
                for name, slope in gradients.items()
            }
        finally:
            for name, (requires_grad, gradient) in before.items():
                parameters[name].requires_grad_(requires_grad)
                parameters[name].grad = gradient

    def _summed(self, coalition: Coalition) -> dict[str, Tensor]:
        if not self._in_sum or not self._in_sum <= coalition:
            self._sum, self._in_sum = {name: self._zeros(name) for name in self._names}, frozenset()
        more = sorted(coalition - self._in_sum)
        self._in_sum = frozenset()  # invalid until the sum is complete again
        for i in more:
            self._add(self._sum, i, 1.0)
        self._in_sum = coalition
        return self._sum

    def _add(self, total: dict[str, Tensor], i: int, share: float) -> None:
        factor = share * self._coefficients[i]
        if factor == 0.0:
            return
        for name in self._updates[i].names:
            total[name].add_(self._change(i, name).to(total[name].device), alpha=factor)

    def _change(self, i: int, name: str) -> Tensor:
        """Return a tensor of an update in float32; callers must not modify it."""
        decoded = self._decoded
        if decoded is not None and (i, name) in decoded:
            return decoded[i, name]
        tensor = self._updates[i].decode(name)
        self._updates[i].release(name)
        if decoded is not None:
            decoded[i, name] = tensor
        return tensor

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros_like(self._kept[name], dtype=torch.float32)

    @contextmanager
    def _with_step(self, step: dict[str, Tensor]) -> Iterator[None]:
        tensors = model_tensors(self._model)
        try:
            with torch.no_grad():
                for name, change in step.items():
                    tensors[name].copy_(self._kept[name].float() + change)
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._kept.items():
                    tensors[name].copy_(tensor)

    def _check(self, tensors: dict[str, Tensor]) -> None:
        for update in self._updates:
            for name in update.names:
                shape = tuple(tensors[name].shape) if name in tensors else None
                if shape != update.record(name).shape:
                    raise GymError(
                        ErrorCode.BASE_MISMATCH,
                        f"{update.path}: tensor {name!r} {list(update.record(name).shape)} does not fit the model",
                    )


def round_coefficients(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    max_norm: float | None = None,
    server_learning_rate: float = 1.0,
) -> list[float]:
    """Return each update's coefficient in a weighted mean: ``server_learning_rate * clip_i * w_i / sum w``."""
    total = math.fsum(weights)
    coefficients = []
    for update, weight in zip(updates, weights, strict=True):
        norm = update.norm()
        clip = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
        coefficients.append(server_learning_rate * clip * weight / total)
    return coefficients
