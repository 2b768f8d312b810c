"""Compute the embeddings and logits of tokens that variants add to the base, in a step with other variants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.chunk import Chunk, EmbeddedRows, HiddenMean, reserve_room, rows_of_step
from gym_fed.serving.forward.kv_cache import KVCache

_TOLERANCE, _TOLERANCE_BFLOAT16 = 1e-4, 0.02
"""Tolerance: above rounding errors in float32 and bfloat16, and far below the effect of a scale."""

_PLACEHOLDER = 0
"""Token of the base whose embedding is replaced."""


@contextmanager
def trial_chunk(cache: KVCache) -> Iterator[Chunk]:
    """Create a chunk of the base for ``require_plain_head``; its cache is released afterwards."""
    try:
        chunk = Chunk([0, 1], cache, hidden=HiddenMean())
        reserve_room([chunk])
        yield chunk
    finally:
        cache.release()


def require_plain_head(model: Any, logits: Tensor, states: Sequence[Tensor | None]) -> None:
    """Check that a model's logits are the output of its head, neither scaled nor capped.

    Args:
        model: The base.
        logits: The logits of one token, ``[1, vocabulary]``.
        states: The last hidden states of a text that ends with it.

    Raises:
        GymError: ``MODEL_INVALID`` if they are not.
    """
    head = model.get_output_embeddings()
    (hidden,) = states
    assert hidden is not None
    plain = functional.linear(hidden[-1:].to(head.weight.dtype), head.weight, head.bias).float()
    close = _TOLERANCE if head.weight.dtype == torch.float32 else _TOLERANCE_BFLOAT16
    if not torch.allclose(plain, logits, rtol=close, atol=close * float(logits.abs().max())):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(model).__name__} changes the output of its head, so the added tokens of a variant cannot be served",
            "apply the variant's file and serve the model: gym delta apply BASE FILE -o FOLDER",
        )


def with_added_embeddings(chunk: Chunk) -> Chunk:
    """Replace the added tokens of a chunk with placeholders whose embeddings are given, for the base to compute."""
    rows = None if chunk.variant is None else chunk.variant.vocabulary
    if rows is None or max(chunk.token_ids) < rows.first:
        return chunk
    places = [at for at, token_id in enumerate(chunk.token_ids) if token_id >= rows.first]
    ids = torch.tensor([chunk.token_ids[at] - rows.first for at in places], device=rows.embeddings.device)
    added = EmbeddedRows(places, rows.embeddings[ids])
    token_ids = [_PLACEHOLDER if token_id >= rows.first else token_id for token_id in chunk.token_ids]
    return replace(chunk, token_ids=token_ids, pictures=rows_of_step([(0, chunk.pictures), (0, added)]))


def with_added_logits(logits: Tensor, chunks: Sequence[Chunk], states: Sequence[Tensor | None]) -> Tensor:
    """Return the logits, extended by those of the added tokens of each chunk's variant.

    Args:
        logits: The base's, ``[rows, vocabulary] float32``.
        chunks: The chunks, to which the rows belong in order.
        states: The last hidden states of each chunk's tokens, if its variant has added tokens.
    """
    sizes = [chunk.variant.vocabulary.size for chunk in chunks if chunk.variant and chunk.variant.vocabulary]
    if not sizes:
        return logits
    wide = widened(logits, max(*sizes, logits.shape[1]))
    start = 0
    for chunk, hidden in zip(chunks, states, strict=True):
        rows = None if chunk.variant is None else chunk.variant.vocabulary
        if rows is not None and chunk.rows:
            assert hidden is not None  # a chunk whose variant has added tokens needs them
            last = hidden[len(hidden) - chunk.rows :].to(rows.head.dtype)
            wide[start : start + chunk.rows, rows.first : rows.size] = functional.linear(
                last, rows.head, rows.bias
            ).float()
        start += chunk.rows
    return wide


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate logits of different vocabularies."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([widened(part, width) for part in parts])


def widened(logits: Tensor, size: int) -> Tensor:
    """Return logits for ``size`` tokens, with -inf for additional ones."""
    return (
        logits
        if logits.shape[1] == size
        else functional.pad(logits, (0, size - logits.shape[1]), value=-math.inf)
    )
