"""Quantise low-rank deltas: rotate to singular components, and allocate bits to each.

LoRA's factors are defined only up to an invertible matrix between them, so they are first turned into the singular
components of their product, each factor scaled by the root of the singular values. Components then differ by orders of
magnitude, and bits are spent where they reduce the product's error most: many on the first components, none on the last
(Mirzaei et al. 2025, "LoRAQuant", split them into two parts; here each component gets its own codec, by convex hulls
under a byte budget). A plan is text: ``int8*2,int4*5`` is two components in int8, then five in int4; ``int4`` alone
applies to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gym_quant.allocation import Option, allocate
from gym_quant.codec import CodecError
from gym_quant.factor_encoding import (
    GROUP,
    decode_factor,
    encode_factor,
    factor_codecs,
    is_factor_codec,
    payload_size,
)

_SEGMENT = re.compile(r"([a-z][a-z0-9]*)(?:\*([1-9]\d{0,5}))?", re.ASCII)
LARGEST_EXACT = 768
"""Largest value of a matrix's smaller dimension for which a full SVD is computed."""
_OVERSAMPLE = 8
_POWER_ITERATIONS = 4


@dataclass(frozen=True)
class Components:
    """The singular components of a delta ``left @ right``; each factor is scaled by the roots of the singular values.

    Attributes:
        left: ``[rows, r]`` float64; column ``i`` has norm ``sqrt(values[i])``.
        right: ``[r, cols]`` float64.
        values: ``[r]`` float64, descending.
    """

    left: Tensor
    right: Tensor
    values: Tensor

    def first(self, rank: int) -> Components:
        """Keep the ``rank`` largest components."""
        return Components(self.left[:, :rank], self.right[:rank], self.values[:rank])


def components_of_product(b: Tensor, a: Tensor) -> Components:
    """Compute the components of ``b @ a`` (``[rows, r]``, ``[r, cols]``) by QR of both and an SVD of the core."""
    left, left_core = torch.linalg.qr(b.double())
    right, right_core = torch.linalg.qr(a.double().T)
    u, s, v = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
    return _balanced(left @ u, s, v @ right.T)


def components_of_matrix(matrix: Tensor, rank: int, start: Tensor | None = None) -> Components:
    """Compute the ``rank`` largest components of a full matrix ``[rows, cols]``.

    A full SVD is used if the smaller dimension is at most 768; otherwise subspace iteration (Halko et al. 2011, alg.
    4.4) from a fixed random start and, if given, the columns of ``start`` (``[rows, k]``), which should nearly span
    the result.
    """
    wide = matrix.double()
    rank = min(rank, *wide.shape)
    if min(wide.shape) <= LARGEST_EXACT:
        u, s, v = torch.linalg.svd(wide, full_matrices=False)
        return _balanced(u[:, :rank], s[:rank], v[:rank])
    generator = torch.Generator().manual_seed(0)
    width = min(rank + _OVERSAMPLE, *wide.shape)
    basis = wide @ torch.randn(wide.shape[1], width, generator=generator, dtype=torch.float64)
    if start is not None:
        basis = torch.cat([start.double(), basis], dim=1)
    basis = torch.linalg.qr(basis)[0]
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(wide @ torch.linalg.qr(wide.T @ basis)[0])[0]
    u, s, v = torch.linalg.svd(basis.T @ wide, full_matrices=False)
    return _balanced((basis @ u)[:, :rank], s[:rank], v[:rank])


def parse_plan(plan: str, rank: int) -> tuple[tuple[str, int], ...]:
    """Parse a plan into the codec and number of components of every part.

    Raises:
        CodecError: For unknown codecs, counts that do not add up to the rank, and plans that are not in their shortest
            form.
    """
    parts: list[tuple[str, int]] = []
    texts = plan.split(",")
    for text in texts:
        match = _SEGMENT.fullmatch(text)
        if match is None or not is_factor_codec(match[1]) or (match[2] is None and len(texts) > 1):
            raise CodecError(
                f"factors is {plan!r}; it must be bfloat16, float32, or parts such as int8*2,int4*5 with the codecs "
                f"{', '.join(factor_codecs())}"
            )
        parts.append((match[1], int(match[2]) if match[2] else rank))
    if sum(count for _, count in parts) != rank:
        raise CodecError(f"factors {plan!r} does not add up to rank {rank}")
    if write_plan(parts) != plan:
        raise CodecError(f"factors {plan!r} is not in normal form {write_plan(parts)!r}")
    return tuple(parts)


def write_plan(parts: Sequence[tuple[str, int]]) -> str:
    """Format a plan."""
    merged: list[tuple[str, int]] = []
    for codec, count in parts:
        if merged and merged[-1][0] == codec:
            merged[-1] = (codec, merged[-1][1] + count)
        else:
            merged.append((codec, count))
    return merged[0][0] if len(merged) == 1 else ",".join(f"{codec}*{count}" for codec, count in merged)


def plan_factors(
    tensors: Mapping[str, Components], budget_bytes: int, group: int = GROUP
) -> dict[str, tuple[int, str]]:
    """Plan every tensor so that all payloads fit ``budget_bytes`` with the least error of the products.

    Both factors of every component are encoded with every codec; a component's error is the squared distance of its
    decoded outer product, or its squared singular value if it is dropped. The refitting that
    ``gym_quant.factor_encoding.encode_both_factors`` does afterwards is ignored.

    Returns:
        Rank and plan by name, without tensors for which no component fits or is worth its bytes.
    """
    options: dict[str, list[Option]] = {}
    for name, components in tensors.items():
        pair = (components.left.T.float().contiguous(), components.right.float().contiguous())
        measured = [[_measured(factor, codec, group) for factor in pair] for codec in factor_codecs()]
        for i, value in enumerate(components.values.tolist()):
            options[f"{name}\n{i:06}"] = [
                (0, value**2),
                *(
                    (left[0] + right[0], value**2 * _outer_loss(left[1][i], right[1][i]))
                    for left, right in measured
                ),
            ]
    chosen = allocate(options, budget_bytes) or {}
    plans: dict[str, tuple[int, str]] = {}
    for name, components in tensors.items():
        picks = sorted(chosen.get(f"{name}\n{i:06}", 0) for i in range(len(components.values)))
        parts = [(factor_codecs()[pick - 1], 1) for pick in picks if pick]
        if parts:
            plans[name] = (len(parts), write_plan(parts))
    return plans


def _measured(factor: Tensor, codec: str, group: int) -> tuple[int, list[tuple[float, float]]]:
    """Return the bytes per component and, for each, the recovered share (``<u, q> / <u, u>``) and the energy share."""
    parts = ((codec, factor.shape[0]),)
    payload = encode_factor(factor, parts, group, "x")
    decoded = decode_factor(payload, parts, factor.shape[1], group, "x").double()
    wide = factor.double()
    energy = wide.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    shares = zip(
        ((wide * decoded).sum(1) / energy).tolist(), (decoded.square().sum(1) / energy).tolist(), strict=True
    )
    return payload_size(payload) // factor.shape[0], list(shares)


def _outer_loss(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Compute ``|u v' - q p'|^2 / |u v'|^2`` from the shares of both factors."""
    return max(0.0, 1.0 + left[1] * right[1] - 2.0 * left[0] * right[0])


def _balanced(u: Tensor, s: Tensor, v: Tensor) -> Components:
    root = s.sqrt()
    return Components(u * root, root[:, None] * v, s)
