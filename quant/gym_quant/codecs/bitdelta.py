"""BitDelta: one sign bit per weight and a scale per tensor, or per group along the input dimension.

Liu et al. 2024, "BitDelta: Your Fine-Tune May Only Be Worth One Bit", eq. 1-3: the delta is approximated by
``scale * sign(delta)`` with ``scale = mean |delta|``, which minimises the L2 error for given signs. As in the
authors' code, the bit is 1 where delta >= 0. For the layout of the bits see ``gym_quant.packing``; the work is done in
``gym_quant.kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gym_quant.codec import (
    ROW,
    SCALE_DTYPES,
    Codec,
    CodecError,
    Encoded,
    MergeForm,
    Params,
    Payload,
    Shape,
    as_matrix,
    check_finite,
    columns_of,
    group_size,
    only_known,
    scale_params,
    scaled_fields,
)
from gym_quant.kernels import SignMatrix, decode_signs, encode_signs
from gym_quant.packing import packed_width, unpack_signs


class BitDelta(Codec):
    """Payload: ``scales`` (``[1]``, or ``[rows, groups]``) and ``bits`` (``[rows, ceil(cols / 8)]`` uint8).

    Parameters:
        group_size: Columns that share a scale; absent means one scale for the tensor. The last group of a row
            may be shorter; a group as wide as the row gives one scale per row.
        scale_dtype: ``float32`` (default) or ``bfloat16``.
    """

    name = "bitdelta"
    coarse = True
    trains_bits = True
    compact = ({}, {"group_size": ROW})
    has_scales = True
    takes_gain = True
    for_small = True

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("group_size", "scale_dtype"), self.name)
        return scale_params(params)

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        """Choose one scale per tensor unless the policy sets a group; ``auto`` uses row scales if worth their bytes."""
        cols, dtype = as_matrix(shape)[1], words.get("scale_dtype", "float32")
        chosen = {"group_size": columns_of(words, cols, None), "scale_dtype": dtype}
        why = ""
        if words.get("group_size") == "auto" and (delta is None or self._rows_are_worth_it(delta, dtype)):
            chosen["group_size"], why = cols, "one scale per row keeps more energy per byte"
        return self.normalise(chosen, shape), why

    def _rows_are_worth_it(self, delta: Tensor, scale_dtype: str) -> bool:
        """Return True if row scales keep more energy per extra byte than one scale per tensor keeps per byte.

        Signs and the mean magnitude of n weights keep ``(sum |d|)^2 / n`` of their energy (Liu et al. 2024, eq. 3).
        """
        shape = tuple(delta.shape)
        rows, cols = as_matrix(shape)
        if rows == 1:
            return False
        single_scale = self.normalise({"scale_dtype": scale_dtype}, shape)
        magnitudes = np.abs(delta.reshape(rows, cols).numpy()).sum(axis=1, dtype=np.float64)
        kept_by_one = float(magnitudes.sum()) ** 2 / (rows * cols)
        kept_by_rows = float(np.square(magnitudes).sum()) / cols
        bytes_of_one = self.payload_bytes(shape, single_scale)
        more_bytes = self.payload_bytes(shape, {**single_scale, "group_size": cols}) - bytes_of_one
        return (kept_by_rows - kept_by_one) * bytes_of_one > kept_by_one * more_bytes

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        dtype = SCALE_DTYPES[str(params.get("scale_dtype", "float32"))]
        group = group_size(params)
        scales = (1,) if group is None else (rows, -(-cols // group))
        return {"scales": (dtype, scales), "bits": (torch.uint8, (rows, packed_width(cols)))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        shape = tuple(tensor.shape)
        normalised = self.normalise(params, shape)
        matrix = tensor.detach().to("cpu", torch.float32).reshape(as_matrix(shape))
        bits, means = encode_signs(matrix, None, group_size(normalised))
        scales = means.to(self.payload_spec(shape, normalised)["scales"][0])
        check_finite(scales, "scale")
        return Encoded(normalised, {"scales": scales, "bits": bits})

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        group, scales = group_size(params), payload["scales"]
        part = scales if group is None else scales[start:stop]
        return decode_signs(payload["bits"][start:stop], part, as_matrix(shape)[1], group)

    def decode_block(
        self, payload: Payload, shape: Shape, params: Params, rows: slice, cols: slice
    ) -> Tensor:
        bits = payload["bits"][rows, cols.start // 8 : packed_width(cols.stop)]
        group, scales, width = group_size(params), payload["scales"], cols.stop - cols.start
        if group is None:
            return decode_signs(bits, scales, width)
        groups = torch.arange(cols.start, cols.stop) // group
        return unpack_signs(bits, width).mul_(scales[rows].to(torch.float32)[:, groups])

    def signs(self, payload: Payload, shape: Shape, params: Params) -> SignMatrix:
        scales = payload["scales"].to(torch.float32)
        return SignMatrix(payload["bits"], scales, as_matrix(shape)[1], group_size(params))

    def merge_form(self, shape: Shape, params: Params) -> MergeForm:
        return MergeForm("signs", group_size(params))

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Multiply the scales; signs do not change."""
        return scaled_fields(payload, factor, ("scales",))

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        scales = payload["scales"]
        if scales.dtype == torch.float32 and scales.numel():
            values = scales.detach().cpu().numpy()
            if values.min() >= 0 and values.max() < math.inf:  # NaN satisfies neither comparison
                return
        check_finite(scales, "scale")
        if bool((scales < 0).any()):
            raise CodecError(f"scale is negative: {float(scales.min())}")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """Compute the exact norm without decoding: every weight of a group has the magnitude of its scale."""
        rows, cols = as_matrix(shape)
        squares = np.square(payload["scales"].to(torch.float64).numpy())
        group = group_size(params)
        if group is None:
            return math.sqrt(float(squares[0]) * rows * cols)
        counts = np.full(squares.shape[1], min(group, cols), dtype=np.float64)
        counts[-1] = cols - group * (squares.shape[1] - 1)
        return math.sqrt(float((squares * counts).sum()))
