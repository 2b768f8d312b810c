"""Merge trusted fine-tunes into one delta by a merge method, one tensor at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import EncodeReport, encode_source
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.method import Gate, MergeMethod, Score, TensorTask
from gym_fed.soup.methods._task_vectors import combination


@dataclass(frozen=True)
class ModelMergeReport:
    """The report of a merge of models.

    Attributes:
        sha256: Lower-case hex sha256 of the merged delta.
        size_bytes: Size of the merged delta in bytes.
        norm: L2 norm of the decoded delta.
        update_norms: L2 norm of each model's delta, in the given order.
        found: Report of the method (``MergeMethod.report``).
        encoding: Codec and reason for each tensor.
    """

    sha256: str
    size_bytes: int
    norm: float
    update_norms: tuple[float, ...]
    found: Mapping[str, Any]
    encoding: EncodeReport = field(repr=False)


def merge_models(
    updates: Sequence[DeltaFile],
    weights: Sequence[float],
    method: MergeMethod,
    policy: CodecPolicy,
    out_path: str | Path,
    spec: BaseSpec,
    *,
    base: Mapping[str, Tensor] | None = None,
    statistics: Sequence[Mapping[str, Tensor]] = (),
    score: Score | None = None,
    gate: Gate | None = None,
    extra: Mapping[str, str] | None = None,
    on_tensor: Callable[[str], None] = lambda _: None,
) -> ModelMergeReport:
    """Merge deltas of one base.

    Memory holds up to three copies of one tensor's deltas (original, sparsified, and the result) and its statistics;
    merged tensors are stored in a scratch file next to the result.

    Args:
        updates: Open deltas of ``spec``; a tensor that one lacks counts as zero.
        weights: Positive weight of each update.
        method: The merge method; use a new object for each merge, since its report covers all of them.
        policy: Codec policy of the result, without error feedback.
        out_path: Path of the result, a ``.gymdelta`` of ``spec``.
        spec: Base of all updates.
        base: The base's tensors, for methods that read them.
        statistics: Statistics of each update by tensor, for methods that need them.
        score: Scoring function, for methods that choose by held-out data.
        gate: Function that may forbid a choice, for the same methods.
        extra: Free strings for the manifest.
        on_tensor: Called with the name of each merged tensor.

    Raises:
        GymError: ``BASE_MISMATCH`` for an update of a different base; ``USAGE`` for inputs that the method needs and
            lacks, or does not use; and errors from ``merge_tensor``.
    """
    weight = torch.tensor(list(weights), dtype=torch.float64)
    _check(updates, weight, method, spec, base, statistics, score, gate)
    norms = tuple(update.norm() for update in updates)
    if score is not None:
        method.choose(weight, score, gate)
    folder = Path(out_path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as scratch:
        merged: dict[str, Tensor] = {}
        for name in sorted({name for update in updates for name in update.names}):
            shape = as_matrix(spec.shapes[name])
            task = TensorTask(
                name,
                _stacked(updates, name, shape),
                weight,
                base[name].detach().cpu().float().reshape(shape) if method.uses_base and base else None,
                tuple(own[name] for own in statistics if name in own),
            )
            target = torch.from_numpy(np.memmap(scratch, np.float32, "w+", scratch.seek(0, 2), shape))
            target.copy_(method.merge_tensor(task))
            merged[name] = target.reshape(spec.shapes[name])
            on_tensor(name)

        def source(name: str) -> Tensor:
            return merged[name] if name in merged else torch.zeros(spec.shapes[name])

        report = encode_source(source, policy, out_path, spec, extra=extra)
    return ModelMergeReport(report.sha256, report.size_bytes, report.norm, norms, method.report(), report)


def combined(updates: Sequence[DeltaFile], coefficients: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Compute one tensor of a linear combination of deltas, ``shape`` float32; a ``Score`` adds it to the base."""
    matrix = as_matrix(shape)
    rows = [
        update.decode(name).reshape(matrix) if name in update else torch.zeros(matrix) for update in updates
    ]
    return combination(rows, coefficients).reshape(shape)


def _stacked(updates: Sequence[DeltaFile], name: str, shape: tuple[int, int]) -> Tensor:
    """Stack deltas to ``[n, rows, cols]`` float32."""
    stacked = torch.zeros(len(updates), *shape)
    for row, update in zip(stacked, updates, strict=True):
        if name in update:
            row.copy_(update.decode(name).reshape(shape))
    return stacked


def _check(
    updates: Sequence[DeltaFile],
    weights: Tensor,
    method: MergeMethod,
    spec: BaseSpec,
    base: Mapping[str, Tensor] | None,
    statistics: Sequence[Mapping[str, Tensor]],
    score: Score | None,
    gate: Gate | None,
) -> None:
    if len(updates) != len(weights):
        raise GymError(
            ErrorCode.USAGE, f"{counted(len(updates), 'update')} but {counted(len(weights), 'weight')}"
        )
    method.check(weights)
    for update in updates:
        if update.manifest.base_digest != spec.digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{update.path} was made for base {update.manifest.base_digest}, not {spec.digest}",
            )
    if method.uses_base and base is None:
        raise GymError(ErrorCode.USAGE, f"merge method {method.name!r} needs the base's weights")
    needed = len(updates) if method.statistics is not None else 0
    if len(statistics) != needed:
        raise GymError(
            ErrorCode.USAGE,
            f"merge method {method.name!r} needs {method.statistics or 'no statistics'}"
            f"{' of ' + counted(needed, 'model') if needed else ''}, but those of {len(statistics)} are given",
            "create them with gym soup statistics" if needed else "omit the statistics",
        )
    if method.uses_score != (score is not None) or (gate is not None and score is None):
        raise GymError(
            ErrorCode.USAGE,
            f"merge method {method.name!r} {'selects by' if method.uses_score else 'does not use'} held-out data",
            "pass held-out data" if method.uses_score else "omit score and gate",
        )
