"""lattice: multiples of a step that is a power of two, so that deltas on the same grid can be added as integers.

A uniform quantiser without dead zone, ``code = round(delta / step)``, entropy-coded. By default the step is about
``STEP_IN_RMS`` root mean squares of the tensor, whose loss error feedback compensates at about 1.5 bits per weight
(this project; for entropy-coded uniform quantisers see Gish and Pierce 1968, "Asymptotically Efficient Quantizing").
Codes are digits in the base of their number of levels, as many per byte as fit, so that deflate's Huffman codes come
within a few per cent of the entropy.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gym_quant.codec import (
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
    whole_number,
)
from gym_quant.codecs.int8 import Int8
from gym_quant.grid import Integers
from gym_quant.integers import IntegerCodec
from gym_quant.resident import Resident

STEP_IN_RMS = 1.6
"""Step in root mean squares of the tensor, before it is rounded to a power of two."""

_EXPONENTS = (-126, 100)
_MAX_CODE = (1 << 31) - 1
_HEAD, _WIDE_HEAD = 3, 5
_DEFLATED = 0x80
_SAMPLE = 1 << 18
_LIKELY_BITS = 17 / 64
"""Maximum number of bytes per weight of a new grid: a step of 1.1 rms has at most 2.03 bits of entropy."""

Codes = NDArray[np.signedinteger[Any]]


class Lattice(IntegerCodec):
    """Payload: ``scales`` (``[1]`` float32, the step) and ``codes`` (``[bytes]`` uint8).

    The first byte of ``codes`` is the number of codes per byte (0: two bytes per code, 15: four), plus 128 if the rest
    is a raw deflate stream. Next is the lowest code and, unless codes are wide, the number of levels minus one, one
    byte each (the lowest of wide codes takes four bytes, little-endian, signed).

    Parameters:
        bytes: Size of ``codes``.
    """

    name = "lattice"
    compact = ({},)

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("bytes",), self.name)
        if "bytes" not in params:
            return {}
        most = _WIDE_HEAD + 4 * math.prod(shape)
        return {"bytes": whole_number(params["bytes"], "bytes", 1, most)}

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        if delta is None:
            likely = _WIDE_HEAD + math.ceil(_LIKELY_BITS * math.prod(shape))
            return self.normalise({"bytes": min(likely, _WIDE_HEAD + 4 * math.prod(shape))}, shape), ""
        return self.encode(delta, exponent=words.get("exponent")).params, ""

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        size = int(params.get("bytes", _WIDE_HEAD + 4 * math.prod(shape)))
        return {"scales": (torch.float32, (1,)), "codes": (torch.uint8, (size,))}

    def encode(self, tensor: Tensor, exponent: int | None = None, **params: Any) -> Encoded:
        """Encode a delta; ``exponent`` is that of the step, by default ``exponent_of``."""
        self.normalise(params, tuple(tensor.shape))
        matrix = to_matrix(tensor)
        if exponent is None:
            exponent = self.exponent_of(matrix)
        codes = np.rint(matrix.numpy().astype(np.float64) * 2.0**-exponent)
        if np.abs(codes).max() > _MAX_CODE:
            raise CodecError(
                f"values up to {float(matrix.abs().max()):g} exceed 2**31 steps of 2**{exponent}"
            )
        return self.encode_integers(torch.from_numpy(codes.astype(np.int64)), exponent)

    def encode_within(self, tensor: Tensor, error: float) -> Encoded:
        matrix = to_matrix(tensor)
        allowed = error**2 * sum_of_squares(matrix)
        # On average, rounding loses at most step**2 / 12 per weight, and less where values cluster.
        coarsest = math.frexp(math.sqrt(12.0 * allowed / matrix.numel()))[1] + 2
        for exponent in range(min(coarsest, _EXPONENTS[1]), _EXPONENTS[0] - 1, -1):
            rounded = torch.round(matrix * 2.0**-exponent) * 2.0**exponent
            if sum_of_squares(rounded.sub_(matrix)) <= allowed:
                return self.encode(tensor, exponent=exponent)
        raise CodecError(f"no step of at least 2**{_EXPONENTS[0]} has a relative error of {error:g}")

    def exponent_of(self, delta: Tensor, previous: int | None = None) -> int:
        """Return the exponent of a step near ``STEP_IN_RMS``.

        ``previous`` is kept until deltas have halved or quadrupled, since sums over few grids are small.
        """
        rms = math.sqrt(sum_of_squares(delta) / delta.numel())
        if rms == 0.0:
            return 0 if previous is None else previous
        part, fresh = math.frexp(STEP_IN_RMS * rms)  # no logarithm, whose last bit depends on the machine
        if previous is not None and fresh <= previous + 2:
            # halved while the step is at least twice STEP_IN_RMS
            return max(_EXPONENTS[0], min(previous, fresh - (part == 0.5)))
        fresh -= part < math.sqrt(0.5)
        if float(delta.abs().max()) * 2.0**-fresh <= 0.5:  # one or two values, which would all be lost
            fresh -= 1
        return max(_EXPONENTS[0], min(fresh, _EXPONENTS[1]))

    def encode_integers(self, codes: Tensor, exponent: int) -> Encoded:
        if not _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
            raise CodecError(f"step 2**{exponent} is not within 2**{_EXPONENTS[0]} and 2**{_EXPONENTS[1]}")
        written = np.frombuffer(_write(codes.numpy().reshape(-1)), np.uint8)
        payload = {"scales": torch.tensor([2.0**exponent]), "codes": torch.from_numpy(written.copy())}
        return Encoded({"bytes": len(written)}, payload)

    def integers(self, payload: Payload, shape: Shape, params: Params) -> Integers | None:
        part, exponent = math.frexp(float(payload["scales"][0]))
        if part != 0.5:
            return None
        count = math.prod(shape)
        return Integers(
            torch.from_numpy(_read(payload["codes"], count, 0, count)).reshape(shape), exponent - 1
        )

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        rows, cols = as_matrix(shape)
        codes = _read(payload["codes"], rows * cols, start * cols, stop * cols)
        return torch.from_numpy(codes).to(torch.float32).mul_(payload["scales"]).reshape(stop - start, cols)

    def resident(
        self, payload: Payload, shape: Shape, params: Params, device: torch.device
    ) -> Resident | None:
        """Return a byte per weight, as for int8 with an offset; None if the codes do not fit a byte."""
        rows, cols = as_matrix(shape)
        numbers, low, levels, way = _opened(payload["codes"], rows * cols)
        if not levels:
            return None
        codes = _unpack(numbers, levels, way)[: rows * cols].astype(np.uint8).reshape(rows, cols)
        step = payload["scales"]
        fields = {"scales": step.clone(), "offsets": step * low, "codes": torch.from_numpy(codes)}
        return Int8().resident(fields, shape, {"symmetric": 0}, device)

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Scale the step; unless ``factor`` is a power of two, the result can no longer be added as integers."""
        return scaled_fields(payload, factor, ("scales",))

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        check_finite(payload["scales"], "scale")
        step, count = float(payload["scales"][0]), math.prod(shape)
        if step < 0:
            raise CodecError(f"scale is negative: {step}")
        numbers, low, levels, _ = _opened(payload["codes"], count)
        ends = [0, levels - 1] if levels else [int(numbers.min()), int(numbers.max())]
        most = max(abs(low + end) for end in ends)
        if most > _MAX_CODE:
            raise CodecError(f"code {most} exceeds {_MAX_CODE}")
        check_finite(torch.tensor([float(most)]) * payload["scales"], "largest value")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        count = math.prod(shape)
        codes = torch.from_numpy(_read(payload["codes"], count, 0, count))
        return math.sqrt(sum_of_squares(codes)) * float(payload["scales"][0])


def _write(codes: Codes) -> bytes:
    """Write codes in the shortest of a few ways; for a large tensor, these are compared on a sample."""
    low, levels = int(codes.min()), int(codes.max() - codes.min()) + 1
    if levels > 256 or not -128 <= low <= 127:
        most = best = 0 if levels <= 1 << 16 else 15
        stored = (codes - low).astype("<u2" if best == 0 else "<u4").tobytes()
        head, packed = low.to_bytes(4, "little", signed=True), _deflate(stored)
    else:
        digits = codes - low
        most = max(k for k in range(1, 9) if max(levels, 2) ** k <= 256)
        ways = range(max(1, most - 2), most + 1)
        best = min(ways, key=lambda k: len(_deflate(_pack(digits[:_SAMPLE], levels, k))))
        head, packed = bytes([low & 255, levels - 1]), _deflate(_pack(digits, levels, best))
        stored = _pack(digits, levels, most)
    if len(packed) < len(stored):
        return bytes([best | _DEFLATED]) + head + packed
    return bytes([most]) + head + stored


def _opened(field: Tensor, count: int) -> tuple[NDArray[Any], int, int, int]:
    """Inflate ``count`` codes.

    Returns:
        The packed numbers, the lowest code, and the levels and codes per number; 0 levels if each number is one code.

    Raises:
        CodecError: If the field does not contain exactly ``count`` codes. Never more than their bytes are inflated.
    """
    data = field.numpy().tobytes()
    way, is_deflated = data[0] & ~_DEFLATED, bool(data[0] & _DEFLATED)
    wide = {0: 2, 15: 4}.get(way)
    if wide is None and not 1 <= way <= 8:
        raise CodecError(f"codes have {way} values per byte")
    head = _HEAD if wide is None else _WIDE_HEAD
    if len(data) < head:
        raise CodecError("codes are truncated")
    size = -(-count // way) if wide is None else wide * count
    body = _inflate(data[head:], size) if is_deflated else data[head:]
    if len(body) != size:
        raise CodecError(f"codes take {len(body)} bytes instead of {size}")
    if wide is not None:
        return np.frombuffer(body, f"<u{wide}"), int.from_bytes(data[1:head], "little", signed=True), 0, 1
    low, levels = int.from_bytes(data[1:2], "little", signed=True), data[2] + 1
    numbers = np.frombuffer(body, np.uint8)
    if levels**way < 256 and int(numbers.max()) >= levels**way:
        raise CodecError(f"a byte of {way} codes is {int(numbers.max())}, too large for {levels} levels")
    return numbers, low, levels, way


def _read(field: Tensor, count: int, start: int, stop: int) -> Codes:
    """Read codes ``start`` to ``stop`` of ``count``: int16, or int64 if they are wide."""
    numbers, low, levels, way = _opened(field, count)
    if not levels:
        return numbers[start:stop].astype(np.int64) + low
    first = start // way
    digits = _unpack(numbers[first : -(-stop // way)], levels, way)
    return digits[start - first * way : stop - first * way] + np.int16(low)


def _pack(digits: Codes, levels: int, per_byte: int) -> bytes:
    """Write digits in base ``levels``, the first of a byte as its lowest."""
    padded = np.zeros(-(-len(digits) // per_byte) * per_byte, dtype=np.uint8)
    padded[: len(digits)] = digits
    total = np.zeros(len(padded) // per_byte, dtype=np.uint16)
    for place in reversed(range(per_byte)):
        total = total * np.uint16(levels) + padded[place::per_byte]
    return total.astype(np.uint8).tobytes()


def _unpack(numbers: NDArray[np.uint8], levels: int, per_byte: int) -> Codes:
    table = np.arange(256)[:, None] // levels ** np.arange(per_byte)[None] % levels
    codes: Codes = table.astype(np.int16)[numbers].reshape(-1)
    return codes


def _deflate(data: bytes) -> bytes:
    """Deflate with only Huffman codes and runs, since codes have no other patterns to search for."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _inflate(data: bytes, size: int) -> bytes:
    unpacker = zlib.decompressobj(-15)
    try:
        inflated = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise CodecError(f"codes are not a deflate stream: {error}") from error
    if len(inflated) > size or not unpacker.eof or unpacker.unused_data:
        raise CodecError(f"codes do not inflate to exactly {size} bytes")
    return inflated
