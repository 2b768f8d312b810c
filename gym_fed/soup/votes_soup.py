"""Make a soup from a sum of integer votes, for rounds in which the hub sees only the sum."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from gym_quant.codec import as_matrix
from numpy.typing import NDArray
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.privacy.secure_aggregation.votes import fold, require_votes
from gym_fed.soup.building import build_aggregator, build_optimizer
from gym_fed.soup.merging import SoupReport
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.soup.private import PrivateMerge, PrivateReport, SignVotes


def soup_from_votes(
    sums: Iterable[tuple[str, NDArray[np.int16]]],
    voters: int,
    bits: int,
    step_norm: float,
    recipe: SoupRecipe,
    out_path: str | Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    optimizer_state: OptimizerState | None = None,
    private: PrivateMerge | None = None,
) -> SoupReport:
    """Add noise if configured, apply the rule and the server's step, and encode.

    A vote changes a weight by ``step_norm / sqrt(d)``, for d coordinates; the aggregator's ``of_votes`` maps the sum to
    the result.

    Without noise, the sums are checked to be sums of votes. With noise they are folded instead, so that for any input
    one vote changes a coordinate by one and cannot abort the round.

    Args:
        sums: Name and ``[size]`` sums modulo 2^bits of votes in {-1, 0, 1}, for every tensor of the base in order of
            name; from ``sum_masked``.
        voters: Number of contributors that voted.
        bits: Number of bits of the sums, k.
        step_norm: L2 norm of the update that one contributor's votes represent.
        recipe: The rules; its aggregator must be a function of the sum (``counts_votes``).
        out_path: Path of the soup.
        spec: The base.
        residual: The server's error feedback, required if and only if ``recipe.codec.error_feedback`` is set.
        optimizer_state: State of ``recipe.server_optimizer``; the caller stages it.
        private: Settings of the ``discrete_gaussian`` noise, which is added to the sum first.

    Raises:
        GymError: ``UPDATE_REFUSED`` if the aggregate overflows float32 or, without noise, if the sums cannot be sums of
            votes.
    """
    coordinates = spec.num_parameters
    aggregator = build_aggregator(recipe)
    query = SignVotes(private, voters, coordinates, aggregator) if private is not None else None
    optimizer = build_optimizer(recipe)
    vote = step_norm / math.sqrt(coordinates)
    folder = Path(out_path).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as scratch:
        merged: dict[str, Tensor] = {}
        for name, total in sums:
            if query is not None:
                noised = fold(total, bits) + query.begin(name)(len(total))
                values: NDArray[np.float64] = query.value(noised)
            else:
                require_votes(name, total, voters)
                values = aggregator.of_votes(total.astype(np.int64), voters, vote, noised=False)
            shape = as_matrix(spec.shapes[name])
            target = torch.from_numpy(np.memmap(scratch, np.float32, "w+", scratch.seek(0, 2), shape))
            target.copy_(torch.from_numpy(values).to(torch.float32).reshape(shape))
            if optimizer is not None and optimizer_state is not None:
                target.copy_(optimizer.step(name, target, optimizer_state))
            if recipe.server_learning_rate != 1.0:
                target.mul_(recipe.server_learning_rate)
            if not bool(torch.isfinite(target).all()):
                raise GymError(ErrorCode.UPDATE_REFUSED, f"tensor {name!r}: the aggregate overflows float32")
            merged[name] = target.reshape(spec.shapes[name])
        version = recipe.merge_version
        report = encode_source(
            lambda name: merged[name], recipe.codec, out_path, spec, residual, version=version
        )
    private_report = (
        PrivateReport(coordinates, private.privacy.clipping_norm) if private is not None else None
    )
    return SoupReport(
        report.sha256, report.size_bytes, report.norm, (), (), None, report, private=private_report
    )
