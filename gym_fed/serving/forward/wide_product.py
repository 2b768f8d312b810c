"""A product with weights in bfloat16 that is computed in float32, a block of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Weights that are widened at a time."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x[..., in] @ weight.T`` in float32; no copy of the whole weight is made."""
    wide, step = x.to(torch.float32), max(1, _BLOCK // weight.shape[1])
    return torch.cat([wide @ block.to(torch.float32).T for block in torch.split(weight, step)], dim=-1)
