"""Count over contributors' packed signs without unpacking: distances, votes, majorities."""

from __future__ import annotations

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native, reference

_INT32 = (1 << 31) - 1


def hamming(packed: Tensor) -> Tensor:
    """Compute pairwise Hamming distances of packed rows.

    Args:
        packed: ``[n, bytes]`` uint8; padding bits count, and are zero in format version 1.

    Returns:
        ``[n, n]`` int64, symmetric with a zero diagonal.
    """
    rows = _packed(packed)
    chosen = dispatch.path()
    return reference.hamming(rows) if chosen == "torch" else native.hamming(chosen, rows)


def votes(packed: Tensor, weights: Tensor | None = None) -> Tensor:
    """Count the rows with a 1 at each bit, or sum those rows' weights.

    Args:
        packed: ``[n, bytes]`` uint8.
        weights: ``[n]`` whole numbers whose magnitudes sum to less than 2^31.

    Returns:
        ``[8 * bytes]`` int32, least significant bit of a byte first.

    Raises:
        CodecError: For weights of another shape or dtype, or so large that a sum could overflow.
    """
    rows = _packed(packed)
    if weights is not None:
        if weights.shape != rows.shape[:1] or weights.dtype.is_floating_point:
            raise CodecError(f"weights are {list(weights.shape)} {weights.dtype}, not [{len(rows)}] integers")
        wide = weights.detach().to(torch.int64)
        if bool((wide.abs() > _INT32).any()) or int(wide.abs().sum()) > _INT32:
            raise CodecError(f"weights sum to {int(wide.abs().sum())}, more than {_INT32}")
        weights = wide.to(torch.int32).contiguous()
    chosen = dispatch.path()
    return reference.votes(rows, weights) if chosen == "torch" else native.votes(chosen, rows, weights)


def majority(packed: Tensor) -> Tensor:
    """Packed bits ``[bytes]`` uint8: 1 where at least half of the rows ``[n, bytes]`` have a 1."""
    rows = _packed(packed)
    chosen = dispatch.path()
    return reference.majority(rows) if chosen == "torch" else native.majority(chosen, rows)


def _packed(packed: Tensor) -> Tensor:
    if packed.ndim != 2 or packed.dtype != torch.uint8 or packed.device.type != "cpu" or not len(packed):
        raise CodecError(
            f"packed is {list(packed.shape)} {packed.dtype} on {packed.device}, "
            "not [n, bytes] uint8 of at least one row on the CPU"
        )
    return packed.contiguous()
