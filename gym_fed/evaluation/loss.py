"""Held-out loss: the mean negative log-likelihood of unseen text, per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from gym_fed.data.encoding import IGNORED, encode_rows

BATCH_TOKENS = 2048
"""Maximum number of tokens of a forward pass, which bounds the logits in memory."""

MAX_BLOCKS = 25
"""Maximum number of blocks of held-out rows for estimating the sampling error of a loss difference."""

Vector: TypeAlias = "NDArray[np.float64]"
OnDone: TypeAlias = Callable[[int], object]
"""Called with the number of items that were just finished."""


def ignore_progress(count: int) -> None:
    """Do nothing, as an ``OnDone``."""


@dataclass(frozen=True)
class RowLosses:
    """The loss of every held-out row.

    Attributes:
        sums: ``[rows]`` float64, nats.
        counts: ``[rows]`` number of predicted tokens.
    """

    sums: Vector
    counts: Vector

    @property
    def mean(self) -> float:
        """Mean negative log-likelihood in nats per token; NaN without a token."""
        total = float(self.counts.sum())
        return float(self.sums.sum()) / total if total else math.nan

    @property
    def block_weights(self) -> Vector:
        """The share of all tokens in each block of rows, ``[blocks]``."""
        return self._by_block(self.counts)

    def gain_to(self, after: RowLosses) -> Vector:
        """Return ``[blocks]``: each block's contribution to ``self.mean - after.mean`` on the same rows."""
        return self._by_block(self.sums - after.sums)

    def _by_block(self, values: Vector) -> Vector:
        blocks = num_blocks(len(values))
        return np.asarray([values[k::blocks].sum() for k in range(blocks)]) / float(self.counts.sum())


def num_blocks(rows: int) -> int:
    """Return the number of blocks into which the held-out rows are split."""
    return min(rows, MAX_BLOCKS)


def heldout_loss(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_length: int = 256, batch_size: int = 32
) -> float:
    """Return the mean negative log-likelihood in nats per token.

    Args:
        model: A causal LM; it is in evaluation mode during the call, and its mode is restored afterwards.
        rows: Held-out rows; ``messages`` rows count the assistant's tokens, ``text`` rows all tokens.
        max_length: Maximum number of tokens of a row; longer rows are truncated.
        batch_size: Rows per forward pass; the result does not depend on it beyond rounding.

    Returns:
        The mean over all counted tokens of all rows. May be inf or NaN for a broken model.

    Raises:
        GymError: ``DATA_INVALID`` if the rows have nothing to predict.
    """
    return heldout_row_losses(model, tokenizer, rows, max_length=max_length, batch_size=batch_size).mean


@torch.inference_mode()
def heldout_row_losses(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_length: int = 256, batch_size: int = 32
) -> RowLosses:
    """Measure the summed loss and the number of tokens of each row that has a token to predict.

    Arguments and errors are those of ``heldout_loss``.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length)
    sums, counts = np.zeros(len(encoded)), np.zeros(len(encoded))
    for at, losses, predicted in _in_batches(model, tokenizer, encoded, batch_size):
        sums[at], counts[at] = losses.sum(1).double().cpu().numpy(), predicted.sum(1).cpu().numpy()
    return RowLosses(sums, counts)


@torch.inference_mode()
def half_losses(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_length: int = 256
) -> tuple[RowLosses, RowLosses]:
    """Measure each row's loss on its tokens at even positions, and on those at odd positions.

    A model chosen for a row by one half is not favoured by the other. See ``heldout_loss`` for the arguments and
    errors.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length)
    sums, counts = np.zeros((2, len(encoded))), np.zeros((2, len(encoded)))
    for at, losses, predicted in _in_batches(model, tokenizer, encoded, 32):
        for half in (0, 1):
            sums[half, at] = losses[:, half::2].sum(1).double().cpu().numpy()
            counts[half, at] = predicted[:, half::2].sum(1).cpu().numpy()
    return RowLosses(sums[0], counts[0]), RowLosses(sums[1], counts[1])


@torch.inference_mode()
def row_losses(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    max_length: int,
    batch_size: int = 16,
    on_done: OnDone = ignore_progress,
) -> list[float]:
    """Return the mean negative log-likelihood of each row in nats per token, in the order of ``rows``.

    For the arguments see ``heldout_loss``; a batch also has at most ``BATCH_TOKENS`` tokens, padding included. A row
    without a token to predict within ``max_length`` gives NaN.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length, keep_all=True)
    losses = [math.nan] * len(rows)
    for at, of_tokens, predicted in _in_batches(model, tokenizer, encoded, batch_size, BATCH_TOKENS):
        sums, counts = of_tokens.sum(1).tolist(), predicted.sum(1).tolist()
        for index, total, count in zip(at, sums, counts, strict=True):
            losses[index] = total / count if count else math.nan
        on_done(len(at))
    return losses


def batch_losses(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], max_length: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the summed loss of each batch in nats (a scalar, with its graph if gradients are enabled) and its tokens.

    The model is in evaluation mode until the last batch; then its mode is restored.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length)
    for _, losses, predicted in _in_batches(model, tokenizer, encoded, batch_size):
        yield losses.sum(1).sum(), int(predicted.sum())


def _in_batches(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[dict[str, list[int]]],
    batch_size: int,
    batch_tokens: int | None = None,
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Yield batches of similar length: row indices, losses ``[n, tokens]``, and the mask of predicted tokens.

    The loss of a token that is not predicted is zero.
    """
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
    device = next(model.parameters()).device
    pad = tokenizer.pad_token_id or 0
    was_training = model.training
    model.eval()
    try:
        start = 0
        while start < len(order):
            at = order[start : start + batch_size]
            while batch_tokens and len(at) > 1 and len(at) * len(encoded[at[-1]]["input_ids"]) > batch_tokens:
                at = at[: len(at) // 2]
            start += len(at)
            batch = [encoded[i] for i in at]
            ids = padded([row["input_ids"] for row in batch], pad).to(device)
            labels = padded([row["labels"] for row in batch], IGNORED).to(device)
            mask = padded([[1] * len(row["input_ids"]) for row in batch], 0).to(device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            targets = labels[:, 1:]
            losses = cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
            ).view_as(targets)
            yield at, losses, targets != IGNORED
    finally:
        model.train(was_training)


def padded(rows: list[list[int]], value: int, *, left: bool = False) -> torch.Tensor:
    """Pad rows of ids to ``[n, longest]`` int64 with ``value`` on the right, or on the left."""
    width = max(map(len, rows))
    fills = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, fills, strict=True)])
