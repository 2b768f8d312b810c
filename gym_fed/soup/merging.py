"""Merge a round's updates into one soup, a block of coordinates at a time.

No more than a few blocks of ``BLOCK_ELEMENTS`` numbers are held, however many contributors there are; the
merged tensors wait in a scratch file beside the result until they are encoded. Every step is elementwise or
runs in a fixed order, so the same updates in the same order give the same bytes on any number of threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.config.soup import SoupRecipe
from gym_fed.delta import BaseSpec, DeltaFile, EncodeReport, ErrorFeedback, encode_source
from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.registry import build_aggregator

BLOCK_ELEMENTS = 1 << 20
"""Decoded numbers held at a time, of all contributors together (but at least one row of each)."""


@dataclass(frozen=True)
class SoupReport:
    """What a merge did.

    Attributes:
        sha256: Lower-case hex sha256 of the soup.
        size_bytes: Its size.
        norm: L2 norm of the delta it decodes to.
        update_norms: L2 norm of every update, in the order given.
        clip_factors: What each was multiplied by; 1.0 where it was within ``max_norm``.
        encoding: Codec and reason for each tensor of the soup.
    """

    sha256: str
    size_bytes: int
    norm: float
    update_norms: tuple[float, ...]
    clip_factors: tuple[float, ...]
    encoding: EncodeReport = field(repr=False)


def merge(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    recipe: SoupRecipe,
    out_path: str | Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    extra: Mapping[str, str] | None = None,
) -> SoupReport:
    """Clip, aggregate, scale by the server's learning rate and encode, tensor by tensor; codecs may be mixed.

    Args:
        updates: Open deltas of ``spec``; a tensor that an update leaves out counts as zero.
        weights: A positive weight for each.
        recipe: The rules.
        out_path: Where the soup goes, itself a ``.gymdelta`` of ``spec``.
        spec: The base of updates and soup.
        residual: The server's error feedback, needed exactly when ``recipe.codec.error_feedback`` is set. The
            new residual counts when the caller commits it.
        extra: Free strings for the soup's manifest.

    Raises:
        GymError: ``BASE_MISMATCH`` for an update of another base, ``CONFIG_INVALID`` when the round is too
            small for the recipe, ``UPDATE_REFUSED`` when the aggregate overflows float32.
    """
    aggregator = build_aggregator(recipe)
    weight = torch.tensor(list(weights), dtype=torch.float32)
    _check(updates, weight, spec, aggregator)
    norms = tuple(update.norm() for update in updates)
    factors = tuple(_clip_factor(norm, recipe.max_norm) for norm in norms)
    names = sorted({name for update in updates for name in update.names})
    folder = Path(out_path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as scratch:
        merged: dict[str, Tensor] = {}
        for name in names:
            shape = as_matrix(spec.shapes[name])
            target = torch.from_numpy(np.memmap(scratch, np.float32, "w+", scratch.seek(0, 2), shape))
            _merge_tensor(name, updates, factors, weight, aggregator, recipe.server_learning_rate, target)
            merged[name] = target.reshape(spec.shapes[name])

        def source(name: str) -> Tensor:
            return merged[name] if name in merged else torch.zeros(spec.shapes[name])

        report = encode_source(source, recipe.codec, out_path, spec, residual, extra)
    return SoupReport(report.sha256, report.size_bytes, report.norm, norms, factors, report)


def _merge_tensor(
    name: str,
    updates: Sequence[DeltaFile],
    factors: Sequence[float],
    weights: Tensor,
    aggregator: Aggregator,
    learning_rate: float,
    target: Tensor,
) -> None:
    """Fill ``target`` ``[rows, cols]`` row block by row block."""
    rows, cols = target.shape
    step = max(1, BLOCK_ELEMENTS // (cols * len(updates)))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        block = torch.zeros(len(updates), (stop - start) * cols)
        for row, update, factor in zip(block, updates, factors, strict=True):
            if name in update:
                row.copy_(update.decode_rows(name, start, stop).reshape(-1))
                if factor != 1.0:
                    row.mul_(factor)
        result = aggregator.aggregate(block, weights).mul_(learning_rate)
        if not bool(torch.isfinite(result).all()):
            raise GymError(ErrorCode.UPDATE_REFUSED, f"tensor {name!r}: the aggregate overflows float32")
        target[start:stop] = result.reshape(stop - start, cols)


def _clip_factor(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _check(updates: Sequence[DeltaFile], weights: Tensor, spec: BaseSpec, aggregator: Aggregator) -> None:
    if weights.numel() != len(updates):
        raise GymError(ErrorCode.USAGE, f"{len(updates)} updates but {weights.numel()} weights")
    aggregator.check(weights)
    for update in updates:
        if update.manifest.base_digest != spec.digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{update.path} was made for base {update.manifest.base_digest}, not {spec.digest}",
            )
        for record in update.manifest.tensors:
            if spec.shapes.get(record.name) != record.shape:
                raise GymError(
                    ErrorCode.BASE_MISMATCH,
                    f"{update.path}: tensor {record.name!r} {list(record.shape)} is not one of the base's",
                )
