"""LoRA: a matrix delta kept as its two factors, ``delta = scaling * B @ A``.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3, with ``scaling = alpha / r``.
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


class Lora(Codec):
    """Payload: ``a`` (``[r, cols]`` bfloat16) and ``b`` (``[rows, r]`` bfloat16).

    Parameters:
        rank: ``r``, at least 1 and at most the smaller side of the matrix.
        scaling: Factor of the product, finite; absent means 1.0.
    """

    name = "lora"

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("rank", "scaling"), self.name)
        if len(shape) < 2:
            raise CodecError(f"shape {list(shape)} is not a matrix")
        kept: Params = {"rank": whole_number(params.get("rank"), "rank", 1, max(1, min(as_matrix(shape))))}
        scaling = params.get("scaling", 1.0)
        if isinstance(scaling, bool) or not isinstance(scaling, int | float) or not math.isfinite(scaling):
            raise CodecError(f"scaling is {scaling!r}, not a finite number")
        if scaling != 1.0:
            kept["scaling"] = float(scaling)
        return kept

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        rank = int(params["rank"])
        return {"a": (torch.bfloat16, (rank, cols)), "b": (torch.bfloat16, (rows, rank))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        """The best factors of a full delta: truncated SVD, the singular values shared evenly by both."""
        kept = self.normalise(params, tuple(tensor.shape))
        rank, scaling = int(kept["rank"]), float(kept.get("scaling", 1.0))
        if scaling == 0.0:
            raise CodecError("scaling is 0, so no factors can make a delta")
        u, s, v = torch.linalg.svd(to_matrix(tensor) / abs(scaling), full_matrices=False)
        root = s[:rank].sqrt()
        return self.encode_factors(
            v[:rank] * root[:, None], math.copysign(1.0, scaling) * u[:, :rank] * root, scaling
        )

    def encode_factors(self, a: Tensor, b: Tensor, scaling: float = 1.0) -> Encoded:
        """Factors as they were trained: ``a`` ``[r, cols]``, ``b`` ``[rows, r]``, any float dtype.

        Raises:
            CodecError: When they do not fit each other or are not finite in bfloat16.
        """
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise CodecError(f"factors A {list(a.shape)} and B {list(b.shape)} do not fit each other")
        kept = self.normalise({"rank": a.shape[0], "scaling": scaling}, (b.shape[0], a.shape[1]))
        payload = {k: f.detach().to("cpu", torch.bfloat16).contiguous() for k, f in (("a", a), ("b", b))}
        self.check(payload, (b.shape[0], a.shape[1]), kept)
        return Encoded(kept, payload)

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        """Multiplied in float64, where products of bfloat16 numbers add up exactly unless their exponents lie
        more than 2**30 apart: the result does not depend on the order in which a BLAS adds them.
        """
        product = payload["b"][start:stop].to(torch.float64) @ payload["a"].to(torch.float64)
        return product.mul_(float(params.get("scaling", 1.0))).to(torch.float32)

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        check_finite(payload["a"], "factor A")
        check_finite(payload["b"], "factor B")
        peak = math.prod(float(f.abs().max()) for f in payload.values()) * int(params["rank"])
        if peak * abs(float(params.get("scaling", 1.0))) > torch.finfo(torch.float32).max:
            raise CodecError("the product of its factors may overflow float32")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """``|BA|_F = sqrt(sum((B'B) * (AA')))`` in float64, from two ``r x r`` Gram matrices."""
        a, b = (payload[k].to(torch.float64).numpy() for k in ("a", "b"))
        gram = np.einsum("rk,sk->rs", a, a) * np.einsum("kr,ks->rs", b, b)
        return abs(float(params.get("scaling", 1.0))) * math.sqrt(max(0.0, float(gram.sum())))
