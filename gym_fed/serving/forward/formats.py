"""What ``auto`` means: the format of the base's linear layers, and the kernel of the sign deltas beside them."""

from __future__ import annotations

from typing import Any

import torch
from gym_quant.kernels import dispatch
from gym_quant.linear import linear_formats

from gym_fed.core.errors import ErrorCode, GymError


def base_format_for(wanted: str, dtype: str, why_not: str, name: str) -> str | None:
    """The packed format of the linear layers; None leaves the model's own weights to torch.

    ``auto`` packs a bfloat16 base as it is, where there is native code: the same numbers, read twice as fast.

    Args:
        wanted: ``auto``, or a format of ``gym_quant.linear``.
        dtype: Of the model.
        why_not: Why the own forward does not compute the model's steps; empty where it does.
        name: Of the model, for the error.

    Raises:
        GymError: ``CONFIG_INVALID`` for a format that is named, where transformers' forward computes.
    """
    if wanted == "auto":
        return "bfloat16" if dtype == "bfloat16" and not why_not and dispatch.path() != "torch" else None
    if wanted not in linear_formats():
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"base_format is {wanted!r}",
            f"use auto, {' or '.join(linear_formats())}",
        )
    if why_not:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"base_format {wanted}: {name} is served by transformers' own forward, as {why_not}",
            "leave base_format at auto",
        )
    return wanted


def kernel_for(wanted: str, base_format: str | None, model: Any) -> str:
    """``exact`` beside a base in float32, which loses nothing; ``lookup`` beside one that loses more than it does.

    Args:
        wanted: ``auto``, ``exact``, ``lookup`` or ``lookup16``.
        base_format: As it is configured; None: the model's own weights.
        model: The model.
    """
    if wanted != "auto":
        return wanted
    weights = next(model.parameters())
    narrow = weights.dtype == torch.bfloat16 or base_format not in (None, "auto")
    return "lookup" if narrow and weights.device.type == "cpu" else "exact"
