"""One product with base plus delta, in place of one with each, in forwards that are of one variant alone.

The base's weights are only read: a sum is a matrix of its own. Those of a small model are kept while the same variant
is computed, so that its deltas are decoded once; of a large one they are made a block at a time, and none is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.serving.forward.loaded import VariantWeight
from gym_fed.serving.forward.variant_weights import DenseWeight, PackedWeight

MOST_KEPT = 64 << 20
"""Bytes of sums that are kept."""


class MergedWeights:
    """Sums for the forwards of one variant.

    Args:
        bulk_rows: Without room to keep it, a sum is made for so many rows or more.
    """

    def __init__(self, bulk_rows: int) -> None:
        self._bulk_rows = bulk_rows
        self._kept: dict[str, Tensor] = {}
        self._bytes = 0

    def product(self, name: str, module: nn.Module, delta: VariantWeight | None, x: Tensor) -> Tensor | None:
        """``x @ (weight + delta).T + bias`` of ``[..., in]``, or None where both products are made apart.

        They are in bfloat16, in which a sum would lose a small delta.
        """
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        if weight.dtype != torch.float32 or not isinstance(delta, PackedWeight | DenseWeight):
            return None
        base = weight if isinstance(module, nn.Linear) else weight.T
        if name not in self._kept and self._bytes + weight.nbytes <= MOST_KEPT:
            self._kept[name] = base + _decoded(delta, 0, len(base))
            self._bytes += weight.nbytes
        if name in self._kept:
            return functional.linear(x, self._kept[name], bias)
        if x.numel() < self._bulk_rows * x.shape[-1] or base is not weight:
            return None
        blocks = delta.held.blocks() if isinstance(delta, PackedWeight) else [(0, len(base))]
        parts = [
            functional.linear(x, base[start:stop] + _decoded(delta, start, stop)) for start, stop in blocks
        ]
        found = torch.cat(parts, dim=-1)
        return found if bias is None else found.add_(bias)


def _decoded(delta: PackedWeight | DenseWeight, start: int, stop: int) -> Tensor:
    return (
        delta.held.decode_block(start, stop) if isinstance(delta, PackedWeight) else delta.matrix[start:stop]
    )
