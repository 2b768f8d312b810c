"""LoRA: a matrix delta stored as its two factors, ``delta = scaling * B @ A``.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3, with ``scaling = alpha / r``. Quantised
factors are the singular components of the product, not the trained factors: see ``gym_quant.factors``.
"""

from __future__ import annotations

import math
import sys
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
    Unsuited,
    as_matrix,
    check_finite,
    only_known,
    positive,
    scaled_fields,
    to_matrix,
    whole_number,
)
from gym_quant.exact import RightFactor, gram
from gym_quant.factor_encoding import (
    GROUP,
    check_factor,
    decode_factor,
    encode_both_factors,
    factor_codecs,
    factor_spec,
)
from gym_quant.factors import (
    Components,
    components_of_matrix,
    components_of_product,
    parse_plan,
    plan_factors,
)
from gym_quant.packing import packed_width

_DEFAULT = "bfloat16"
_PLAIN = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_GROUP = 1 << 31
_MAX_CANCELLED = 2.0**12
"""Maximum ratio of the components' summed norms to the norm of the product. The ratio is about ``sqrt(r)`` for
independent components. At this limit, the squared norm, a sum of Gram entries in float64, is still accurate to six
digits."""
_CHUNK = 1 << 22


FACTOR_BITS = 1.75
"""Default bits per factor element for ``factors: auto``, which makes files 8 times smaller than float16, header
included."""


class Lora(Codec):
    """LoRA factors of a matrix.

    Payload: ``a`` (``[r, cols]``) and ``b`` (``[rows, r]``) in bfloat16 or float32, or the fields of
    ``gym_quant.factor_encoding`` for quantised factors.

    Parameters:
        rank: ``r``, at least 1 and at most the smaller dimension of the matrix.
        scaling: Finite multiplier of the product, 1.0 by default; quantised factors include it and take none.
        factors: ``bfloat16`` (default), ``float32``, or a plan like ``int4`` or ``int8*2,int4*5``
            (``gym_quant.factors``).
        factor_group_size: Values of a quantised component that share a scale, 128 by default.
    """

    name = "lora"
    low_rank = True

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("rank", "scaling", "factors", "factor_group_size"), self.name)
        if len(shape) < 2:
            raise CodecError(f"shape {list(shape)} is not a matrix")
        normalised: Params = {
            "rank": whole_number(params.get("rank"), "rank", 1, max(1, min(as_matrix(shape))))
        }
        scaling = params.get("scaling", 1.0)
        is_number = isinstance(scaling, int | float) and not isinstance(scaling, bool)
        if not is_number or not abs(scaling) <= sys.float_info.max:  # False for NaN
            raise CodecError(f"scaling is {scaling!r}, not a finite number")
        factors, group = params.get("factors", _DEFAULT), params.get("factor_group_size")
        if not isinstance(factors, str):
            raise CodecError(f"factors is {factors!r}, not a string")
        if factors in _PLAIN:
            if group is not None:
                raise CodecError(f"factor_group_size applies to quantised factors, not to {factors}")
            if scaling != 1.0:
                normalised["scaling"] = float(scaling)
            if factors != _DEFAULT:
                normalised["factors"] = factors
            return normalised
        parse_plan(factors, int(normalised["rank"]))
        if scaling != 1.0:
            raise CodecError(f"scaling is {scaling!r}, but quantised factors have no scaling")
        normalised["factors"] = factors
        if group is not None and whole_number(group, "factor_group_size", 1, _MAX_GROUP) != GROUP:
            normalised["factor_group_size"] = group
        return normalised

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        """Choose parameters from the policy; with ``factors: auto``, plan ranks and bits that fit ``factor_bits``."""
        (rows, cols), rank = as_matrix(shape), int(words["lora_rank"])
        if rank * (rows + cols) >= rows * cols:
            raise Unsuited(f"factors of rank {rank} would not be smaller", "dense")
        factors, group = str(words.get("factors", _DEFAULT)), words.get("factor_group_size") or GROUP
        chosen: dict[str, object] = {"rank": rank, "factors": factors}
        if factors == "auto" and delta is not None:
            budget = factor_budget(words.get("factor_bits"), rank * (rows + cols))
            plans = plan_factors({"": components_of_matrix(delta, rank)}, budget, group)
            if not plans:
                raise Unsuited(
                    f"no component of rank {rank} fits {budget} bytes; using sign bits", "bitdelta"
                )
            chosen = {"rank": plans[""][0], "factors": plans[""][1]}
        elif factors == "auto":
            chosen["factors"] = factor_codecs()[0]
        if factors not in _PLAIN:
            chosen["factor_group_size"] = group
        params = self.normalise(chosen, shape)
        return params, f"factors {against_sign_bits(shape, self.payload_bytes(shape, params))}"

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        rank = int(params["rank"])
        if not is_quantised(params):
            dtype = _dtype(params)
            return {"a": (dtype, (rank, cols)), "b": (dtype, (rows, rank))}
        parts, group = _plan(params)
        return {**factor_spec(parts, cols, group, "a"), **factor_spec(parts, rows, group, "b")}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        """Factor a full delta into its largest singular components; the singular values are split evenly."""
        normalised = self.normalise(params, tuple(tensor.shape))
        rank, scaling = int(normalised["rank"]), float(normalised.get("scaling", 1.0))
        if scaling == 0.0:
            raise CodecError("scaling is 0, so no factors can represent the delta")
        matrix = to_matrix(tensor)
        if is_quantised(normalised):
            return self.encode_components(components_of_matrix(matrix, rank), tuple(tensor.shape), normalised)
        u, s, v = torch.linalg.svd(matrix / abs(scaling), full_matrices=False)
        root = s[:rank].sqrt()
        left = math.copysign(1.0, scaling) * u[:, :rank] * root
        plain = str(normalised.get("factors", _DEFAULT))
        return self.encode_factors(v[:rank] * root[:, None], left, scaling, factors=plain)

    def encode_factors(
        self, a: Tensor, b: Tensor, scaling: float = 1.0, rank: int | None = None, **params: Any
    ) -> Encoded:
        """Encode factors as trained: ``a`` ``[r, cols]``, ``b`` ``[rows, r]``, any float dtype.

        ``params`` are ``factors`` and ``factor_group_size``; quantised factors keep the ``rank`` largest components of
        the product (all by default) and absorb the scaling.

        Raises:
            CodecError: If the shapes do not match, or a value is not finite in the stored dtype.
        """
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise CodecError(f"factors A {list(a.shape)} and B {list(b.shape)} do not match")
        shape = (b.shape[0], a.shape[1])
        if params.get("factors", _DEFAULT) not in _PLAIN:
            for factor, name in ((a, "A"), (b, "B")):
                check_finite(factor.detach().to("cpu", torch.float32), f"factor {name}")
            normalised = self.normalise({"rank": rank or a.shape[0], **params}, shape)
            product = components_of_product(scaling * b.detach().cpu().double(), a.detach().cpu())
            return self.encode_components(product, shape, normalised)
        normalised = self.normalise({"rank": a.shape[0], "scaling": scaling, **params}, shape)
        dtype = _dtype(normalised)
        payload = {k: f.detach().to("cpu", dtype).contiguous() for k, f in (("a", a), ("b", b))}
        self.check(payload, shape, normalised)
        return Encoded(normalised, payload)

    def encode_components(self, components: Components, shape: Shape, params: Params) -> Encoded:
        """Encode the first components of a product, quantised by the plan in ``params`` (normalised)."""
        parts, group = _plan(params)
        first = components.first(int(params["rank"]))
        payload = encode_both_factors(first.left, first.right, parts, group)
        self.check(payload, shape, params)
        return Encoded(params, payload)

    def factors(self, payload: Payload, shape: Shape, params: Params) -> tuple[Tensor, Tensor]:
        """Return ``a`` ``[r, cols]`` and ``b`` ``[rows, r]`` without scaling; bfloat16 unless stored in float32."""
        if not is_quantised(params):
            return payload["a"], payload["b"]
        (rows, cols), (parts, group) = as_matrix(shape), _plan(params)
        return decode_factor(payload, parts, cols, group, "a"), decode_factor(
            payload, parts, rows, group, "b"
        ).T

    def rank(self, params: Params) -> int:
        return int(params["rank"])

    def scaling(self, params: Params) -> float:
        return float(params.get("scaling", 1.0))

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Scale the product by scaling ``b`` (or its scales and offsets)."""
        return scaled_fields(
            payload,
            factor,
            tuple(name for name, field in payload.items() if name[0] == "b" and field.is_floating_point()),
        )

    def scaled_params(self, params: Params, factor: float) -> Params | None:
        """Multiply the ``scaling`` parameter, which is exact; quantised factors have none."""
        if is_quantised(params):
            return None
        product = self.scaling(params) * positive(factor)
        if not math.isfinite(product):
            raise CodecError(f"scaling times {factor:g} is {product}, not a finite number")
        rest = {name: value for name, value in params.items() if name != "scaling"}
        return rest if product == 1.0 else {**rest, "scaling": product}

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        """Multiply the factors in float64, independently of a BLAS's order of summation.

        Sums of products of bfloat16 numbers are exact unless their magnitudes differ by a factor of more than 2**30.
        Float32 factors are split into slices, so that their sums are exact too (``gym_quant.exact``).
        """
        a, b = self.factors(payload, shape, params)
        if a.dtype == torch.float32:
            product = RightFactor.of(a).after(b[start:stop])
            return product.mul_(float(params.get("scaling", 1.0))).to(torch.float32)
        product = b[start:stop].to(torch.float64) @ a.to(torch.float64)
        return product.mul_(float(params.get("scaling", 1.0))).to(torch.float32)

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        """Check that factors are finite and do not cancel (``cancels``).

        Norms and inner products of LoRA updates are computed from the factors' Gram matrices, so the product must be
        larger than their rounding errors.
        """
        if is_quantised(params):
            (rows, cols), (parts, group) = as_matrix(shape), _plan(params)
            check_factor(payload, parts, cols, group, "a")
            check_factor(payload, parts, rows, group, "b")
        factors = self.factors(payload, shape, params)
        check_finite(factors[0], "factor A")
        check_finite(factors[1], "factor B")
        peak = math.prod(float(f.abs().max()) for f in factors) * int(params["rank"])
        if peak * abs(float(params.get("scaling", 1.0))) > torch.finfo(torch.float32).max:
            raise CodecError("the product of its factors may overflow float32")
        _check_cancelling(*factors)

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """Return ``|BA|_F = sqrt(sum((B'B) * (AA')))`` in float64, from two ``r x r`` Gram matrices."""
        factors = self.factors(payload, shape, params)
        if factors[0].dtype == torch.float32:
            grams = (gram(factors[0]) * gram(factors[1].T)).numpy()
        else:
            a, b = (factor.to(torch.float64).numpy() for factor in factors)
            grams = np.einsum("rk,sk->rs", a, a) * np.einsum("kr,ks->rs", b, b)
        return abs(float(params.get("scaling", 1.0))) * math.sqrt(max(0.0, float(grams.sum())))


def cancels(a: Tensor, b: Tensor, max_ratio: float = _MAX_CANCELLED) -> bool:
    """Return True if ``sum_k |b_k| |a_k|`` exceeds ``max_ratio`` times ``|b @ a|``.

    Gram matrices then do not determine the product's norm. ``a`` is ``[r, cols]`` and ``b`` ``[rows, r]``, in any
    float dtype.
    """
    if a.shape[0] < 2:
        return False
    left, right = _gram(b.T), _gram(a)
    together = float(np.sqrt(np.diagonal(left) * np.diagonal(right)).sum())
    return together**2 > max_ratio**2 * float((left * right).sum())


def _check_cancelling(a: Tensor, b: Tensor) -> None:
    if cancels(a, b):
        raise CodecError(
            f"the components of its factors cancel each other to less than 1/{_MAX_CANCELLED:.0f} of their norms, "
            "so the norm of their product is not accurate"
        )


def _gram(rows: Tensor) -> np.ndarray:
    """Compute the Gram matrix of ``[r, k]`` as ``[r, r]`` float64, in blocks of columns."""
    total = np.zeros((rows.shape[0], rows.shape[0]))
    step = max(1, _CHUNK // rows.shape[0])
    for start in range(0, rows.shape[1], step):
        total += gram(rows[:, start : start + step]).numpy()
    return total


def factor_budget(factor_bits: float | None, elements: int) -> int:
    """Return the byte budget of ``elements`` factor elements at ``factor_bits`` each (default ``FACTOR_BITS``)."""
    return int((factor_bits or FACTOR_BITS) * elements / 8)


def against_sign_bits(shape: Shape, payload_bytes: int) -> str:
    """Describe a payload's size relative to a sign bit per weight of the product and one float32 scale."""
    rows, cols = as_matrix(shape)
    bits = rows * packed_width(cols) + torch.float32.itemsize
    if payload_bytes <= bits:
        return f"{bits / payload_bytes:.1f} times smaller than the product's sign bits"
    return f"{payload_bytes / bits:.1f} times larger than the product's sign bits"


def is_quantised(params: Params) -> bool:
    """Return True if ``params`` describe quantised factors."""
    return params.get("factors", _DEFAULT) not in _PLAIN


def _dtype(params: Params) -> torch.dtype:
    return _PLAIN[str(params.get("factors", _DEFAULT))]


def _plan(params: Params) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the parts and group size of quantised factors."""
    return parse_plan(str(params["factors"]), int(params["rank"])), int(
        params.get("factor_group_size", GROUP)
    )
