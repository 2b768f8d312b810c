"""BitDelta: one sign bit a weight and a scale per tensor, or per group along the input dimension.

Liu et al. 2024, "BitDelta: Your Fine-Tune May Only Be Worth One Bit", eq. 1-3: the delta is approximated by
``scale * sign(delta)`` with ``scale = mean |delta|``, which minimises the L2 error for given signs. As in the
authors' code the bit is 1 where delta >= 0. For the layout of the bits see ``gym_quant.packing``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gym_quant.codec import (
    Codec,
    CodecError,
    Encoded,
    Params,
    Payload,
    Shape,
    as_matrix,
    check_finite,
    only_known,
    to_matrix,
    whole_number,
)
from gym_quant.packing import pack_signs, packed_width, unpack_signs

_SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_GROUP = 1 << 31


class BitDelta(Codec):
    """Payload: ``scales`` (``[1]``, or ``[rows, groups]``) and ``bits`` (``[rows, ceil(cols / 8)]`` uint8).

    Parameters:
        group_size: Columns that share a scale; absent means one scale for the tensor. The last group of a row
            may be shorter; a group as wide as the row gives one scale per row.
        scale_dtype: ``float32`` (default) or ``bfloat16``.
    """

    name = "bitdelta"

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("group_size", "scale_dtype"), self.name)
        kept: Params = {}
        if params.get("group_size") is not None:
            kept["group_size"] = whole_number(params["group_size"], "group_size", 1, _MAX_GROUP)
        dtype = params.get("scale_dtype", "float32")
        if dtype not in _SCALE_DTYPES:
            raise CodecError(f"scale_dtype is {dtype!r}, not one of {', '.join(_SCALE_DTYPES)}")
        if dtype != "float32":
            kept["scale_dtype"] = dtype
        return kept

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        dtype = _SCALE_DTYPES[str(params.get("scale_dtype", "float32"))]
        group = _group_size(params)
        scales = (1,) if group is None else (rows, -(-cols // group))
        return {"scales": (dtype, scales), "bits": (torch.uint8, (rows, packed_width(cols)))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        matrix = to_matrix(tensor)
        kept = self.normalise(params, tuple(tensor.shape))
        dtype, _ = self.payload_spec(tuple(tensor.shape), kept)["scales"]
        scales = (
            torch.from_numpy(_mean_magnitudes(matrix.numpy(), _group_size(kept))).to(torch.float32).to(dtype)
        )
        check_finite(scales, "scale")
        return Encoded(kept, {"scales": scales, "bits": pack_signs(matrix)})

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        _, cols = as_matrix(shape)
        signs = unpack_signs(payload["bits"][start:stop], cols)
        group = _group_size(params)
        scales = payload["scales"].to(torch.float32)
        if group is None:
            return signs.mul_(scales)
        wide = (
            scales[start:stop].repeat_interleave(group, dim=1)[:, :cols]
            if group < cols
            else scales[start:stop]
        )
        return signs.mul_(wide)

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        scales = payload["scales"]
        check_finite(scales, "scale")
        if bool((scales < 0).any()):
            raise CodecError(f"scale is negative: {float(scales.min())}")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """Exact and free: every weight of a group has the magnitude of its scale."""
        rows, cols = as_matrix(shape)
        squares = np.square(payload["scales"].to(torch.float64).numpy())
        group = _group_size(params)
        if group is None:
            return math.sqrt(float(squares[0]) * rows * cols)
        counts = np.full(squares.shape[1], min(group, cols), dtype=np.float64)
        counts[-1] = cols - group * (squares.shape[1] - 1)
        return math.sqrt(float((squares * counts).sum()))


def _group_size(params: Params) -> int | None:
    value = params.get("group_size")
    return None if value is None else int(value)


def _mean_magnitudes(
    matrix: np.ndarray[Any, np.dtype[np.float32]], group: int | None
) -> np.ndarray[Any, Any]:
    """Mean |x| in float64: ``[1]``, or ``[rows, groups]``. numpy: thread counts cannot change a bit."""
    magnitudes = np.abs(matrix)
    rows, cols = matrix.shape
    if group is None:
        return np.array([magnitudes.sum(dtype=np.float64) / (rows * cols)])
    whole = cols // group
    means = magnitudes[:, : whole * group].reshape(rows, whole, group).mean(axis=2, dtype=np.float64)
    if whole * group == cols:
        return np.asarray(means)
    rest = magnitudes[:, whole * group :].mean(axis=1, dtype=np.float64, keepdims=True)
    return np.concatenate([means, rest], axis=1)
