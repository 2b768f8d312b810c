"""Torch reference of the small decoder operators, and the path without native code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, deltas: Tensor | None, owner: Tensor | None) -> Tensor:
    """``(weight + delta of the row's owner) * x / sqrt(mean(x^2) + eps)``, with the two products separate."""
    normal = functional.rms_norm(x, x.shape[-1:], eps=eps)
    scaled = weight * normal
    if deltas is None or owner is None:
        return scaled
    theirs = torch.where(owner[:, None] >= 0, deltas[owner.clamp_min(0)], 0.0)
    return scaled + theirs.view(len(x), *(1,) * (x.ndim - 2), -1) * normal


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate heads ``[rows, heads, dim]`` by angles ``[rows, dim]``, pairing a head's halves (RoPE as in Llama)."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-high, low), dim=-1) * sine[:, None]
