"""Write a soup of LoRA factors as LoRA factors: stacked exactly, then truncated to a rank.

The mean of products is not the product of means: averaging A and B separately misses the true combination by 15% to 95%
of its norm. Stacked factors are exact. QR and a small SVD truncate them to their best approximation of rank r, and the
truncation residual consists of factors too. Singhal et al. 2025, "FedEx-LoRA: Exact Aggregation for Federated and
Efficient Fine-Tuning of Large Language Models", keeps that residual with the adapter; so does ``residual_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from gym_quant.codecs.lora import cancels
from gym_quant.registry import CODECS, get_codec
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import EncodeReport, lora_delta
from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.gram import CombinationWeights
from gym_fed.soup.low_rank import LowRank, powers_of_two, refactor, rows_of
from gym_fed.soup.stacks import FactorStack, Stack

_EXACT = CodecPolicy(codec="lora", lora_rank=1, factors="float32", error_feedback=False)
_LIKE_SIZE = 40
"""Exponent bound: components whose peaks in both factors lie between 2^-bound and 2^bound are not rescaled."""
_MAX_CANCELLED = 64.0
"""Maximum cancellation between the components of a product; beyond it, the product is factorised again."""


def write_adapters(
    stacks: Sequence[Stack],
    plan: CombinationWeights,
    rule: Aggregator,
    learning_rate: float,
    policy: CodecPolicy,
    out_path: Path,
    spec: BaseSpec,
    extra: Mapping[str, str] | None,
    residual_path: Path | None,
    on_tensor: Callable[[str], None],
) -> tuple[EncodeReport, dict[str, float]] | None:
    """Write ``learning_rate`` times the merged updates as LoRA factors.

    Factors have at most ``policy.lora_rank`` components; the codec ``as-merged`` keeps all. A tensor that factors would
    not make smaller is written as values.

    Args:
        stacks: The round's tensors.
        plan: The combinations of the updates, as computed by the rules.
        rule: The aggregator.
        residual_path: Path of the residual, a separate delta of exact float32 factors; None drops it.
        on_tensor: Called with the name of each merged tensor, but only after the soup is known to consist of factors.

    Returns:
        The written file, and for every tensor the share of its norm that the rank leaves out. None if the soup must be
        written from full matrices: a different codec, error feedback, tensors that are not factors, or a
        coordinate-wise rule on updates whose A differ.
    """
    if not writes_factors(policy) or policy.error_feedback:
        return None
    if not all(isinstance(stack, FactorStack) for stack in stacks):
        return None
    certain = len(plan.matrix) == 1 and not isinstance(rule, CoordinateRule)
    factors: dict[str, tuple[Tensor, Tensor, float]] = {}
    rest: dict[str, tuple[Tensor, Tensor, float]] = {}
    values: dict[str, Tensor] = {}
    lost: dict[str, float] = {}
    for stack in stacks:
        whole = stack.merged(plan, rule) if isinstance(stack, FactorStack) else None
        if whole is None:
            return None
        lost[stack.name] = 0.0
        if policy.lora_rank is None and whole.rank > largest_rank(whole.shape):
            values[stack.name] = rows_of(whole, 0, whole.shape[0]) * learning_rate
        else:
            rank = min(policy.lora_rank or whole.rank, *whole.shape)
            if whole.rank > rank or cancels(whole.a, whole.b, _MAX_CANCELLED):
                cut = refactor(whole, rank)
                whole, lost[stack.name] = cut.kept, cut.relative_residual
                if cut.residual.rank:
                    rest[stack.name] = _factors(cut.residual, learning_rate)
            if whole.rank:
                factors[stack.name] = _factors(whole, learning_rate)
        stack.release()
        if certain:
            on_tensor(stack.name)
    if not certain:
        for stack in stacks:
            on_tensor(stack.name)
    report = lora_delta(factors, out_path, spec, extra, policy, values=values)
    if residual_path is not None:
        lora_delta(rest, residual_path, spec, {"residual_of": report.sha256}, _EXACT)
    return report, lost


def writes_factors(policy: CodecPolicy) -> bool:
    """Return True if a policy writes a soup of factors as factors: the codec is ``as-merged`` or a factor codec."""
    return policy.codec == "as-merged" or (policy.codec in CODECS and get_codec(policy.codec).low_rank)


def largest_rank(shape: tuple[int, int]) -> int:
    """Return the largest rank at which two factors hold fewer numbers than the matrix."""
    rows, cols = shape
    return (rows * cols - 1) // (rows + cols)


def _factors(low_rank: LowRank, scale: float) -> tuple[Tensor, Tensor, float]:
    """Return A, B and the scaling.

    If one factor's components are far larger than the other's, a power of two is moved from one to the other, so that
    both fit the codec's number format.
    """
    a, b = low_rank.a, low_rank.b * scale
    exponents = [np.frexp(powers_of_two(rows).numpy())[1] for rows in (a, b.T)]
    far = np.maximum(*np.abs(exponents)) > _LIKE_SIZE
    moved = torch.from_numpy(np.ldexp(1.0, np.where(far, (exponents[1] - exponents[0]) // 2, 0)))
    return a * moved[:, None], b / moved, 1.0
