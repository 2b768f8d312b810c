"""Dense: unquantised values in bfloat16 (or float32), the fallback for norms and small tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
    scaled_fields,
    sum_of_squares,
    to_matrix,
)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Dense(Codec):
    """Payload: ``values`` (``[rows, cols]``).

    Parameters:
        dtype: ``bfloat16`` (default; rounds to nearest, relative error at most 2**-8) or ``float32`` (exact).
    """

    name = "dense"
    compact = ({"dtype": "bfloat16"},)
    for_small = True
    for_added_rows = True

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("dtype",), self.name)
        dtype = params.get("dtype", "bfloat16")
        if dtype not in _DTYPES:
            raise CodecError(f"dtype is {dtype!r}, not one of {', '.join(_DTYPES)}")
        return {} if dtype == "bfloat16" else {"dtype": dtype}

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        return self.normalise({"dtype": words.get("dense_dtype", "bfloat16")}, shape), ""

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        return {"values": (_DTYPES[str(params.get("dtype", "bfloat16"))], as_matrix(shape))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        normalised = self.normalise(params, tuple(tensor.shape))
        values = to_matrix(tensor).to(_DTYPES[str(normalised.get("dtype", "bfloat16"))])
        check_finite(values, "value rounded to bfloat16")
        return Encoded(normalised, {"values": values})

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        return payload["values"][start:stop].to(torch.float32, copy=True)

    def decode_block(
        self, payload: Payload, shape: Shape, params: Params, rows: slice, cols: slice
    ) -> Tensor:
        return payload["values"][rows, cols].to(torch.float32, copy=True)

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        return scaled_fields(payload, factor, ("values",))

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        check_finite(payload["values"], "value")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        return math.sqrt(sum_of_squares(payload["values"]))
