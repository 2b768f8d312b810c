"""``example_bytes``: a byte for each weight, and a scale for each row. Only what is abstract is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
    sum_of_squares,
    to_matrix,
)
from torch import Tensor


class ExampleBytes(Codec):
    """``value = scale * code`` with codes from -127 to 127."""

    name = "example_bytes"

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, (), self.name)
        return {}

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        return {"codes": (torch.int8, (rows, cols)), "scales": (torch.float32, (rows,))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        made = self.normalise(params, tuple(tensor.shape))
        matrix = to_matrix(tensor)
        scales = matrix.abs().amax(dim=1) / 127
        codes = (matrix / scales.clamp_min(1e-30)[:, None]).round().clamp(-127, 127).to(torch.int8)
        return Encoded(params=made, payload={"codes": codes, "scales": scales})

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        return payload["codes"][start:stop].to(torch.float32) * payload["scales"][start:stop, None]

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        check_finite(payload["scales"], "scales")
        if bool((payload["scales"] < 0).any()):
            raise CodecError("a scale is negative")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        return float(sum_of_squares(self.decode(payload, shape, params)) ** 0.5)
