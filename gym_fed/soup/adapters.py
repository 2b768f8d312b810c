"""A soup of LoRA factors that is itself LoRA factors: stacked exactly, then cut back to a rank.

The mean of products is not the product of means: averaging A and B apart misses the true combination by 15% to 95% of
its norm. Stacked factors are the true combination; cut to rank r by QR and a small SVD they are the best of that rank,
and what that lacks is factors too. Singhal et al. 2025, "FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Large Language Models", keeps that residual beside the adapter; so does ``residual_path``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta import BaseSpec, EncodeReport, lora_delta
from gym_fed.soup.low_rank import LowRank
from gym_fed.soup.refactor import refactor
from gym_fed.soup.stacks import FactorStack, Stack

_EXACT = CodecPolicy(codec="lora", lora_rank=1, factors="float32", error_feedback=False)


def are_adapters(stacks: Sequence[Stack], policy: CodecPolicy) -> bool:
    """Whether a round of these tensors can be written as factors without ever forming a full matrix."""
    return (
        policy.codec == "lora"
        and not policy.error_feedback
        and all(isinstance(stack, FactorStack) for stack in stacks)
    )


def write_adapters(
    stacks: Sequence[Stack],
    coefficients: Tensor,
    learning_rate: float,
    policy: CodecPolicy,
    out_path: Path,
    spec: BaseSpec,
    extra: Mapping[str, str] | None,
    residual_path: Path | None,
) -> tuple[EncodeReport, dict[str, float]]:
    """Write ``learning_rate * sum_i coefficients[i] * update_i`` as factors of at most ``policy.lora_rank``.

    Args:
        stacks: Tensors that are all ``FactorStack``.
        coefficients: ``[n]`` float64.
        residual_path: Where the rest goes as a delta of its own, exact float32 factors; None drops it.

    Returns:
        What was written, and for every tensor the part of its norm that the rank leaves out.
    """
    kept: dict[str, tuple[Tensor, Tensor, float]] = {}
    rest: dict[str, tuple[Tensor, Tensor, float]] = {}
    lost: dict[str, float] = {}
    for stack in stacks:
        assert isinstance(stack, FactorStack)
        assert policy.lora_rank is not None
        whole = stack.combination(coefficients)
        if whole.rank == 0:
            continue
        if whole.rank <= policy.lora_rank:
            kept[stack.name], lost[stack.name] = _factors(whole, learning_rate), 0.0
            continue
        cut = refactor(whole, policy.lora_rank)
        kept[stack.name], lost[stack.name] = _factors(cut.kept, learning_rate), cut.relative_residual
        if cut.residual.rank:
            rest[stack.name] = _factors(cut.residual, learning_rate)
    report = lora_delta(kept, out_path, spec, extra, policy)
    if residual_path is not None:
        lora_delta(rest, residual_path, spec, {"residual_of": report.sha256}, _EXACT)
    return report, lost


def _factors(found: LowRank, scale: float) -> tuple[Tensor, Tensor, float]:
    return found.a, found.b * scale, 1.0
