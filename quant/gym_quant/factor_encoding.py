"""Encode the two factors of a low-rank delta as quantised rows: fields, encoding with refitting, decoding.

A factor is encoded as ``[r, width]``: ``A`` itself, and ``B`` transposed. Groups therefore run along the long
dimension, and every component has its own scales. Consecutive components form parts, each encoded by one of
DeltaQuant's codecs. The fields of part 0 of ``A`` are ``a0_scales``, ``a0_codes`` and so on. Decoded factors are
rounded to bfloat16, so that their product is exact in float64 for any order of its sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gym_quant.codec import CodecError, Params, Payload, Shape
from gym_quant.registry import CODECS, get_codec

GROUP = 128
"""Default number of values of a component that share a scale."""

Parts = Sequence[tuple[str, int]]
"""Codec and number of components of every part."""

_REFITS = 8
_TYPICAL_SHAPE = (1, 4096)


@functools.cache
def factor_codecs() -> tuple[str, ...]:
    """Return the built-in codecs that encode factors (``Codec.factor_params``), most precise first.

    Components in a plan have this order. A plan may also name codecs of other packages.
    """

    def size(name: str) -> int:
        return get_codec(name).payload_bytes(_TYPICAL_SHAPE, part_params(name, _TYPICAL_SHAPE[1]))

    return tuple(sorted(filter(is_factor_codec, CODECS.own()), key=size, reverse=True))


def is_factor_codec(name: str) -> bool:
    """Return True if the codec with this name encodes factors."""
    return name in CODECS and get_codec(name).factor_params(GROUP) is not None


def part_params(codec: str, group: int) -> Params:
    """Return the parameters of a part.

    Raises:
        CodecError: For a codec that does not encode factors.
    """
    params = get_codec(codec).factor_params(group)
    if params is None:
        raise CodecError(f"codec {codec!r} does not write factors")
    return params


def factor_spec(parts: Parts, width: int, group: int, factor: str) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return the dtype and shape of every field of a factor."""
    return {
        f"{factor}{place}_{field}": field_spec
        for place, (codec, count) in enumerate(parts)
        for field, field_spec in get_codec(codec)
        .payload_spec((count, width), part_params(codec, group))
        .items()
    }


def encode_factor(matrix: Tensor, parts: Parts, group: int, factor: str) -> Payload:
    """Encode ``[r, width]`` floats as the fields of one factor."""
    payload: Payload = {}
    for place, (codec, _), rows in _placed(parts):
        encoded = get_codec(codec).encode(matrix[rows], **part_params(codec, group))
        payload.update({f"{factor}{place}_{field}": t for field, t in encoded.payload.items()})
    return payload


def decode_factor(payload: Payload, parts: Parts, width: int, group: int, factor: str) -> Tensor:
    """Decode a factor: ``[r, width]`` bfloat16."""
    decoded = [
        get_codec(codec).decode(
            _part(payload, factor, place), (rows.stop - rows.start, width), part_params(codec, group)
        )
        for place, (codec, _), rows in _placed(parts)
    ]
    return torch.cat(decoded).to(torch.bfloat16)


def check_factor(payload: Payload, parts: Parts, width: int, group: int, factor: str) -> None:
    """Run ``Codec.check`` on every part.

    Raises:
        CodecError: With the factor that is invalid.
    """
    for place, (codec, count) in enumerate(parts):
        try:
            get_codec(codec).check(_part(payload, factor, place), (count, width), part_params(codec, group))
        except CodecError as error:
            raise CodecError(f"factor {factor.upper()}: {error}") from error


def encode_both_factors(left: Tensor, right: Tensor, parts: Parts, group: int) -> Payload:
    """Quantise both factors of ``left @ right`` (``[rows, r]``, ``[r, cols]``) with a small error of the product.

    Both factors are first quantised directly. Then, in alternation, each is fitted to the decoded other (least squares)
    and quantised again. The pair with the smallest error of the product is kept.
    """
    left, right = left.double(), right.double()
    total = float(((left.T @ left) * (right @ right.T)).sum())

    def encode_left(target: Tensor) -> tuple[Payload, Tensor]:
        payload = encode_factor(target.T.float().contiguous(), parts, group, "b")
        return payload, decode_factor(payload, parts, left.shape[0], group, "b").T.double()

    def encode_right(target: Tensor) -> tuple[Payload, Tensor]:
        payload = encode_factor(target.float().contiguous(), parts, group, "a")
        return payload, decode_factor(payload, parts, right.shape[1], group, "a").double()

    def loss(decoded_left: Tensor, decoded_right: Tensor) -> float:
        cross = float(((decoded_left.T @ left) * (decoded_right @ right.T)).sum())
        return (
            total
            - 2 * cross
            + float(((decoded_left.T @ decoded_left) * (decoded_right @ decoded_right.T)).sum())
        )

    (b, decoded_left), (a, decoded_right) = encode_left(left), encode_right(right)
    best, best_payload = loss(decoded_left, decoded_right), {**a, **b}
    for step in range(_REFITS):
        if step % 2 == 0:
            a, decoded_right = encode_right(torch.linalg.pinv(decoded_left) @ left @ right)
        else:
            b, decoded_left = encode_left(left @ (right @ torch.linalg.pinv(decoded_right)))
        error = loss(decoded_left, decoded_right)
        if error < best:
            best, best_payload = error, {**a, **b}
    return best_payload


def payload_size(payload: Payload) -> int:
    """Return a payload's size in bytes."""
    return sum(field.numel() * field.element_size() for field in payload.values())


def _placed(parts: Parts) -> Iterator[tuple[int, tuple[str, int], slice]]:
    start = 0
    for place, part in enumerate(parts):
        yield place, part, slice(start, start + part[1])
        start += part[1]


def _part(payload: Payload, factor: str, place: int) -> Payload:
    start = f"{factor}{place}_"
    return {field.removeprefix(start): t for field, t in payload.items() if field.startswith(start)}
