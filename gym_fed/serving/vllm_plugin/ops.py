"""The custom operator ``gym_fed::add_signed``: opaque to ``torch.compile``, and safe inside CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from gym_quant.kernels.triton_slots import add_signed_slots
from torch import Tensor

_library: Any = torch.library  # without annotations
_LIBRARY = _library.Library("gym_fed", "DEF")
_LIBRARY.define("add_signed(Tensor x, Tensor bits, Tensor scales, Tensor slots, Tensor(a!) y) -> ()")


def _fake(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Shapes only: the operator returns nothing."""


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("add_signed", add_signed_slots, _device)
_library.register_fake("gym_fed::add_signed", _fake, lib=_LIBRARY)


def add_signed(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Add each row's sign delta: ``y[row] += scales[slot] * sign(bits[slot]) @ x[row]``; slot -1 adds nothing.

    Args:
        x: ``[rows, in]`` float32, bfloat16 or float16.
        bits: ``[slots, out, ceil(in / 8)]`` uint8.
        scales: ``[slots, out]`` float32.
        slots: ``[rows or more]`` int32.
        y: ``[rows, out]``, changed in place; its columns are contiguous.
    """
    torch.ops.gym_fed.add_signed(x, bits, scales, slots, y)
