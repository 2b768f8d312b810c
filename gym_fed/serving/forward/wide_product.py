"""A product with weights in bfloat16 that is computed in float32, a block of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.base.modeling.mapped import release_pages

_BLOCK = 1 << 20
"""Weights that are widened at a time."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x[..., in] @ weight.T`` in float32; no copy of the whole weight is made, and one buffer holds every block.

    The pages of a mapped weight leave memory: comparisons go through all layers, which are packed one by one later.
    """
    rows, cols = weight.shape
    wide, step = x.to(torch.float32).reshape(-1, cols), max(1, _BLOCK // cols)
    found = torch.empty(len(wide), rows, device=weight.device)
    buffer = torch.empty(min(step, rows), cols, device=weight.device)
    for start in range(0, rows, step):
        block = weight[start : start + step]
        torch.mm(wide, buffer[: len(block)].copy_(block).T, out=found[:, start : start + len(block)])
    release_pages(weight)
    return found.reshape(*x.shape[:-1], rows)
