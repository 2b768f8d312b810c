"""The interface of delta codecs: encode, decode, payload layout, and norm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError as CodecError
from gym_quant.grid import Integers

if TYPE_CHECKING:
    from gym_quant.kernels.sign_matrix import SignMatrix
    from gym_quant.resident import Resident


Payload = dict[str, Tensor]
Params = dict[str, int | float | str]
Shape = tuple[int, ...]

ALIGNED = 40
"""Alignment of column blocks: a multiple of the codes per byte, which are eight, four, two or five."""

ROW = -1
"""Group size that means one group per row."""

SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Number formats of scales by name; float32 by default."""

_CHUNK = 1 << 16
_MAX_GROUP = 1 << 31


@dataclass(frozen=True)
class Encoded:
    """The result of ``Codec.encode``.

    Attributes:
        params: The parameters without defaults, to be stored with the payload.
        payload: Field name to CPU tensor, exactly as ``payload_spec`` describes it.
    """

    params: Params
    payload: Payload


@dataclass(frozen=True)
class MergeForm:
    """The form in which a merge reads a delta. Updates of equal form are merged directly; others are decoded.

    Attributes:
        kind: ``signs`` (``Codec.signs``), ``factors`` (``Codec.factors``) or ``values``: decoded a block at a time.
        group_size: For signs: columns per scale; None for one scale per tensor.
        since: Merge version that introduced the form. Older recipes read values, so that their soups can be replayed.
    """

    kind: Literal["signs", "factors", "values"]
    group_size: int | None = None
    since: int = field(default=1, compare=False)


VALUES = MergeForm("values")


class Codec(ABC):
    """An encoding of a delta. Stateless; one instance per process.

    A tensor of any shape is treated as a matrix ``[rows, cols]``, where ``cols`` is the last (input) dimension. A codec
    must implement only the abstract methods; by default, the other methods decode, and all flags are False.
    """

    name: ClassVar[str]

    coarse: ClassVar[bool] = False
    """True if it loses a third or more of a fine-tune's norm, as codecs with one or two bits per weight do."""

    trains_bits: ClassVar[bool] = False
    """True if distillation may also train the bits; requires that ``signs`` returns the field ``bits``."""

    compact: ClassVar[tuple[Mapping[str, int | str], ...]] = ()
    """Parameters for compact files (``gym_fed.soup.compact``); ``ROW`` stands for one group per row."""

    has_scales: ClassVar[bool] = False
    """True if its values are multiples of a field ``scales``, set by a policy's ``group_size`` and ``scale_dtype``."""

    has_offsets: ClassVar[bool] = False
    """True if it reads a policy's ``symmetric: false``."""

    takes_gain: ClassVar[bool] = False
    """True if it reads a policy's ``scale_gain``, since its scales are mean magnitudes, which shorten an update."""

    weighs_inputs: ClassVar[bool] = False
    """True if ``encode`` accepts ``importance``, second moments of the layer's inputs."""

    for_small: ClassVar[bool] = False
    """True if it may encode norms, biases and other small tensors."""

    for_added_rows: ClassVar[bool] = False
    """True if it may encode the rows of added tokens, which must be stored without loss."""

    low_rank: ClassVar[bool] = False
    """True if it encodes factors, whose rank a policy must set; then ``rank``, ``factors`` and ``scaling`` apply."""

    sparse: ClassVar[bool] = False
    """True if it drops most weights, so that coordinate-wise rules see mostly zeros; other rules merge its values."""

    adds_up: ClassVar[bool] = False
    """True for a ``gym_quant.integers.IntegerCodec``, whose deltas can be added as integers."""

    @abstractmethod
    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        """Check parameters for a tensor of ``shape`` and drop those equal to the default.

        The name ``bytes`` is reserved for a payload size that depends on the values, a positive integer.

        Raises:
            CodecError: For unknown names, and values out of range.
        """

    @abstractmethod
    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return the dtype and shape of every payload field, in storage order."""

    @abstractmethod
    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        """Encode a delta (any float dtype, any device, any shape).

        Raises:
            CodecError: For values that are not finite and for parameters that ``normalise`` refuses.
        """

    @abstractmethod
    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        """Decode rows ``start`` to ``stop`` of the delta as a matrix: ``[stop - start, cols]`` float32."""

    def decode_block(
        self, payload: Payload, shape: Shape, params: Params, rows: slice, cols: slice
    ) -> Tensor:
        """Decode some columns of some rows, ``[rows, cols]`` float32, with the values of ``decode_rows``.

        By default full rows are decoded first. ``cols`` begins at a multiple of ``ALIGNED`` columns, which is a whole
        byte in every built-in packing.
        """
        return self.decode_rows(payload, shape, params, rows.start, rows.stop)[:, cols]

    @abstractmethod
    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        """Check the values of a payload whose layout is correct.

        Raises:
            CodecError: For scales, factors or values that are NaN, infinite or wrongly negative.
        """

    @abstractmethod
    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """Compute the L2 norm of the decoded delta, without decoding if the codec allows it."""

    def decode(self, payload: Payload, shape: Shape, params: Params) -> Tensor:
        """Decode the whole delta: ``shape``, float32, on the CPU."""
        rows, _ = as_matrix(shape)
        return self.decode_rows(payload, shape, params, 0, rows).reshape(shape)

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Scale the payload by ``factor``, with the same parameters.

        By default the delta is decoded and encoded again. Codecs that are linear in their scales multiply these, so
        codes and signs do not change and only the scales are rounded.

        Args:
            payload: A checked payload; it is not changed.
            shape: The tensor's shape.
            params: The payload's parameters.
            factor: Finite and above 0.

        Raises:
            CodecError: For an invalid factor, or if the result is not finite.
        """
        delta = self.decode(payload, shape, params).mul_(positive(factor))
        return self.encode(delta, **params).payload

    def scaled_params(self, params: Params, factor: float) -> Params | None:
        """Return the parameters of ``factor`` times the delta with the same payload; None if ``scaled`` is needed."""
        del params, factor
        return None

    def rank(self, params: Params) -> int | None:
        """Return the rank of a delta stored as factors; otherwise None."""
        del params
        return None

    def factors(self, payload: Payload, shape: Shape, params: Params) -> tuple[Tensor, Tensor] | None:
        """Return ``a`` ``[r, cols]`` and ``b`` ``[rows, r]`` of a delta ``scaling(params) * b @ a``; otherwise None."""
        del payload, shape, params
        return None

    def scaling(self, params: Params) -> float:
        """Return the multiplier of the factors' product."""
        del params
        return 1.0

    def factor_params(self, group: int) -> Params | None:
        """Return parameters to encode one factor ``[r, width]`` of a low-rank delta; None if that is not supported.

        ``group`` values of a row share their scales.
        """
        del group
        return None

    def merge_form(self, shape: Shape, params: Params) -> MergeForm:
        """Return the form in which a merge reads a delta with these parameters."""
        del shape
        return VALUES if self.rank(params) is None else MergeForm("factors")

    def signs(self, payload: Payload, shape: Shape, params: Params) -> SignMatrix | None:
        """Return the delta as sign bits and scales (possibly the payload's tensors), or None if it is not just that."""
        del payload, shape, params
        return None

    def integers(self, payload: Payload, shape: Shape, params: Params) -> Integers | None:
        """Return the delta as integers times a power of two; None if it is not exactly that."""
        del payload, shape, params
        return None

    def resident(
        self, payload: Payload, shape: Shape, params: Params, device: torch.device
    ) -> Resident | None:
        """Return the delta in serving form, in its own memory on ``device``; signs and (quantised) factors stay packed.

        If None is returned, serving decodes the delta once to the base's number format, which suits codecs with more
        than 8 bits per weight. Codecs with fewer bits return a form from ``gym_quant.resident`` or their own.
        """
        from gym_quant.kernels.resident import ResidentSigns
        from gym_quant.resident import ResidentFactors

        signs = self.signs(payload, shape, params)
        if signs is not None:
            return ResidentSigns.of(signs, device)
        factors = self.factors(payload, shape, params)
        if factors is None:
            return None
        rows, cols = as_matrix(shape)
        if sum(f.nbytes for f in factors) <= self.payload_bytes(shape, params):
            plain = dict(zip("ab", factors, strict=True))
            return ResidentFactors(plain, rows, cols, None, device, self.scaling(params))

        def decode(fields: Payload) -> tuple[Tensor, Tensor]:
            factors = self.factors(fields, shape, params)
            assert factors is not None
            return factors

        return ResidentFactors(payload, rows, cols, decode, device, self.scaling(params))

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        """Choose parameters for a tensor under a codec policy, with the reason in words.

        Args:
            words: The policy's keys (``gym_fed.config.delta.CodecPolicy``); a codec reads those that it supports.
            shape: The tensor's shape.
            delta: The values, float32 on the CPU; None if unknown, for the parameters that take the most bytes.

        Raises:
            Unsuited: If a different codec should encode this tensor.
        """
        del words, delta
        return self.normalise({}, shape), ""

    def payload_bytes(self, shape: Shape, params: Params) -> int:
        """Return the payload's size in bytes."""
        spec = self.payload_spec(shape, params).values()
        return sum(dtype.itemsize * math.prod(field) for dtype, field in spec)


class Unsuited(CodecError):
    """A tensor that a codec should not encode; ``instead`` names a suitable codec."""

    def __init__(self, why: str, instead: str) -> None:
        super().__init__(why)
        self.instead = instead


def columns_of(words: Mapping[str, Any], cols: int, default: int | None) -> int | None:
    """Return the columns per scale under a policy's ``group_size``; None for the whole tensor.

    ``words`` are the policy's keys; ``default`` applies if they set none or leave it to the codec (``auto``).
    """
    size = words.get("group_size")
    if isinstance(size, int):
        return size
    return {"row": cols, "tensor": None}.get(size or "", default)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Return ``[rows, cols]`` of a shape, with the last dimension as columns; a scalar is ``[1, 1]``."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def to_matrix(tensor: Tensor) -> Tensor:
    """Convert a delta to a contiguous float32 CPU matrix ``[rows, cols]``.

    Raises:
        CodecError: If it is empty or has values that are not finite.
    """
    matrix = tensor.detach().to("cpu", torch.float32).reshape(as_matrix(tuple(tensor.shape))).contiguous()
    if matrix.numel() == 0:
        raise CodecError(f"shape {list(tensor.shape)} has no elements")
    check_finite(matrix, "delta")
    return matrix


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise ``CodecError`` at the first NaN or infinity; one pass in chunks, single-threaded."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        finite = np.isfinite(flat[start : start + _CHUNK].detach().to("cpu", torch.float32).numpy())
        if not finite.all():
            at = start + int(finite.argmin())
            raise CodecError(f"{what} is not finite: {float(flat[at])} at flat index {at}")


def sum_of_squares(tensor: Tensor) -> float:
    """Sum the squares in float64, single-threaded so that the result does not depend on the number of threads."""
    flat = tensor.reshape(-1)
    total = 0.0
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(torch.float64).numpy()
        total += float(np.square(chunk).sum())
    return total


def positive(factor: float) -> float:
    """Return ``factor`` if it is finite and positive; otherwise raise ``CodecError``."""
    if not math.isfinite(factor) or factor <= 0.0:
        raise CodecError(f"a delta's scaling must be a finite number above 0, not {factor!r}")
    return factor


def scaled_fields(payload: Payload, factor: float, fields: tuple[str, ...]) -> Payload:
    """Multiply the payload's ``fields`` in float32 and round them to their own dtype.

    Raises:
        CodecError: For a factor that is not above 0, and for a product that is not finite.
    """
    made = dict(payload)
    for name in fields:
        made[name] = (payload[name].to(torch.float32) * positive(factor)).to(payload[name].dtype)
        check_finite(made[name], f"{name.removesuffix('s')} times {factor:g}")
    return made


def only_known(params: Mapping[str, Any], known: tuple[str, ...], codec: str) -> None:
    """Raise ``CodecError`` for an unknown parameter."""
    for key in params:
        if key not in known:
            raise CodecError(
                f"codec {codec!r} has no parameter {key!r} (known: {', '.join(known) or 'none'})"
            )


def scale_params(params: Mapping[str, Any]) -> Params:
    """Normalise ``group_size`` and ``scale_dtype``.

    Raises:
        CodecError: For values outside their range.
    """
    normalised: Params = {}
    if params.get("group_size") is not None:
        normalised["group_size"] = whole_number(params["group_size"], "group_size", 1, _MAX_GROUP)
    dtype = params.get("scale_dtype", "float32")
    if dtype not in SCALE_DTYPES:
        raise CodecError(f"scale_dtype is {dtype!r}, not one of {', '.join(SCALE_DTYPES)}")
    if dtype != "float32":
        normalised["scale_dtype"] = dtype
    return normalised


def group_size(params: Params) -> int | None:
    """Return the columns per group; None for the whole tensor."""
    value = params.get("group_size")
    return None if value is None else int(value)


def whole_number(value: Any, what: str, low: int, high: int) -> int:
    """Return ``value`` if it is an int in ``[low, high]``; raise ``CodecError`` otherwise, also for booleans."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CodecError(f"{what} is {value!r}, not an integer from {low} to {high}")
    return value
