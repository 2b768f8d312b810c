"""The base class of DeltaQuant's codecs, with a small code per weight and numbers shared by a group of weights.

A codec of this family defines how to find a group's shared numbers (``solve``), how a value becomes a code
(``quantise``) and how a code becomes a value (``dequantise``). Parameters, groups, packing, checks and memory are the
same for all and are implemented here. Sums are computed by numpy in float64 and elementwise arithmetic in float32, so
results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gym_quant.bitstream import Bytes, Floats, pack_bits, packed_bits_width, unpack_bits
from gym_quant.codec import (
    SCALE_DTYPES,
    Codec,
    CodecError,
    Encoded,
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
    sum_of_squares,
    to_matrix,
)
from gym_quant.compensation import compensated_codes
from gym_quant.resident import Resident
from gym_quant.resident_codes import ResidentCodes, codes_a_byte, to_planes

_SAMPLE = 1 << 20
_BLOCK = 1 << 18
_FLOOR = 1e-6

Shared = tuple[Floats, ...]
"""A group's shared numbers: one array per field, in the order of ``fields``."""


def column_weights(importance: Tensor, cols: int) -> Floats:
    """Normalise importance (for a matrix, its diagonal) to ``[cols]`` float32 with mean 1, at least a millionth each.

    Raises:
        CodecError: For a wrong length, and for values that are negative or not finite.
    """
    flat = importance.detach().to("cpu", torch.float32)
    if tuple(flat.shape) not in ((cols,), (cols, cols)):
        raise CodecError(f"importance has shape {list(importance.shape)}, not [{cols}] or [{cols}, {cols}]")
    check_finite(flat, "importance")
    flat = flat.diagonal() if flat.dim() == 2 else flat
    if bool((flat < 0).any()):
        raise CodecError(f"importance is negative: {float(flat.min())}")
    numbers = flat.numpy().astype(np.float64)
    mean = float(numbers.mean())
    if mean == 0.0:
        return np.ones(cols, dtype=np.float32)
    return np.maximum(numbers / mean, _FLOOR).astype(np.float32)


def sampled(values: Floats, weights: Floats | None) -> tuple[Floats, Floats | None]:
    """Return all values as one group ``[1, n]``; beyond a million, only every k-th value and the extremes."""
    rows, cols = values.shape
    flat = values.reshape(-1)
    step = -(-flat.size // _SAMPLE)
    if step == 1:
        return flat[None], None if weights is None else np.tile(weights, rows)[None]
    while math.gcd(step, cols) != 1:
        step += 1
    at = np.concatenate([np.arange(0, flat.size, step), [int(flat.argmin()), int(flat.argmax())]])
    return flat[at][None], None if weights is None else weights[at % cols][None]


def float64_sums(values: Floats, weights: Floats | None, descending: bool) -> tuple[Floats, Floats]:
    """Compute each row's running sums of weights (1 by default) and of weight times value, in order of value.

    Both are ``[groups, n]`` float64.
    """
    order = np.argsort(values, axis=1, kind="stable")
    if descending:
        order = order[:, ::-1]
    moments = np.take_along_axis(values, order, 1).astype(np.float64)
    if weights is None:
        mass = np.broadcast_to(np.arange(1.0, values.shape[1] + 1.0), values.shape)
    else:
        sorted_weights = np.take_along_axis(weights, order, 1).astype(np.float64)
        moments *= sorted_weights
        mass = sorted_weights.cumsum(axis=1)
    return mass, moments.cumsum(axis=1, out=moments)


def best_split(gain: Floats) -> npt.NDArray[Any]:
    """Return the index ``[groups, 1]`` of each row's largest gain, the first of equal ones."""
    return np.asarray(gain.argmax(axis=1)[:, None])


class LevelCodec(Codec):
    """Payload: the shared fields (``[1]``, or ``[rows, groups]``), then ``codes`` (``[rows, bytes]`` uint8).

    Parameters:
        symmetric: True (default) or False; written to files as 0 where it is False.
        group_size: Columns that share a scale; absent means one for the tensor. The last group of a row may be
            shorter; a group as wide as the row gives one scale per row (per output channel).
        scale_dtype: Dtype of all shared fields, ``float32`` (default) or ``bfloat16``. Codes are chosen after the
            shared numbers are rounded to it.
    """

    bits: ClassVar[int]
    has_scales = True
    has_offsets = True
    weighs_inputs = True

    @property
    def levels(self) -> int:
        """The number of codes."""
        return 1 << self.bits

    @abstractmethod
    def fields(self, symmetric: bool) -> tuple[str, ...]:
        """Return the names of the shared fields; those named ``...scales`` are never negative."""

    @abstractmethod
    def solve(self, values: Floats, weights: Floats | None, symmetric: bool) -> Shared:
        """Find the shared numbers of each row of ``values`` ``[groups, n]``, as ``[groups]`` float64.

        ``weights`` (``[groups, n]``, positive) weight each squared error; None weights all equally.
        """

    @abstractmethod
    def quantise(self, values: Floats, shared: Shared, symmetric: bool) -> Bytes:
        """Code each value, given shared numbers in float32 that broadcast against it."""

    @abstractmethod
    def dequantise(self, codes: Bytes, shared: Shared, symmetric: bool) -> Floats:
        """Decode each code to float32: the definition of the codec.

        It must be the sum, in order, of the shared numbers, each times a number that depends on the code alone, since
        serving decodes by these numbers.
        """

    def largest(self, shared: Shared, symmetric: bool) -> Floats:
        """Return the largest magnitude that the shared numbers can decode to; the caller refuses overflow."""
        ends = (np.zeros(1, np.uint8), np.full(1, (1 << self.bits) - 1, np.uint8))
        return np.maximum(*(np.abs(self.dequantise(end, shared, symmetric)) for end in ends))

    def pack(self, codes: Bytes) -> Bytes:
        """Pack the codes of whole rows into bytes."""
        return pack_bits(codes, self.bits)

    def unpack(self, packed: Bytes, cols: int) -> Bytes:
        """Unpack the bytes of whole rows into codes."""
        return unpack_bits(packed, self.bits, cols)

    def packed_width(self, cols: int) -> int:
        """Return the number of bytes per packed row."""
        return packed_bits_width(cols, self.bits)

    def check_codes(self, packed: Bytes) -> None:
        """Refuse bytes that are not codes; by default every byte is valid."""

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, ("symmetric", "group_size", "scale_dtype"), self.name)
        normalised: Params = {}
        symmetric = params.get("symmetric", True)
        if symmetric not in (0, 1) or not isinstance(symmetric, int):
            raise CodecError(f"symmetric is {symmetric!r}, neither true nor false")
        if not symmetric:
            normalised["symmetric"] = 0
        return normalised | scale_params(params)

    def parameters(
        self, words: Mapping[str, Any], shape: Shape, delta: Tensor | None = None
    ) -> tuple[Params, str]:
        """Choose one scale per row, unless the policy sets another group."""
        cols = as_matrix(shape)[1]
        chosen = {
            "group_size": columns_of(words, cols, cols),
            "scale_dtype": words.get("scale_dtype", "float32"),
            "symmetric": words.get("symmetric", True),
        }
        return self.normalise(chosen, shape), ""

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, cols = as_matrix(shape)
        dtype = SCALE_DTYPES[str(params.get("scale_dtype", "float32"))]
        group = group_size(params)
        shared = (1,) if group is None else (rows, -(-cols // group))
        spec: dict[str, tuple[torch.dtype, Shape]] = {
            field: (dtype, shared) for field in self.fields(is_symmetric(params))
        }
        return {**spec, "codes": (torch.uint8, (rows, self.packed_width(cols)))}

    def encode(self, tensor: Tensor, importance: Tensor | None = None, **params: Any) -> Encoded:
        """Encode a delta (any float dtype, any device, any shape).

        Args:
            tensor: The delta.
            importance: Second moments of the layer's inputs (``gym_quant.calibration``), to minimise the output error.
                Mean squares ``[cols]`` weigh the search for the shared numbers; with all moments ``[cols, cols]``,
                codes also compensate each other's errors (``gym_quant.compensation``). None weighs columns equally.
            **params: See the class.

        Raises:
            CodecError: For values that are not finite or whose grid overflows, and for invalid parameters.
        """
        matrix, shape = to_matrix(tensor), tuple(tensor.shape)
        normalised = self.normalise(params, shape)
        symmetric, spec = is_symmetric(normalised), self.payload_spec(shape, normalised)
        values = matrix.numpy()
        weights = None if importance is None else column_weights(importance, values.shape[1])
        solved = self._solve_all(values, weights, group_size(normalised), symmetric)
        payload: Payload = {}
        for field, numbers in zip(self.fields(symmetric), solved, strict=True):
            with np.errstate(over="ignore"):
                narrow = torch.from_numpy(numbers.astype(np.float32)).to(spec[field][0])
            payload[field] = narrow.reshape(spec[field][1])
        self._check_shared(payload, symmetric)
        if importance is not None and importance.dim() == 2:
            codes = self._compensated(values, importance, payload, normalised)
        else:
            codes = np.empty(spec["codes"][1], dtype=np.uint8)
            for start, stop in row_blocks(*values.shape):
                shared = self._shared(payload, normalised, values.shape[1], start, stop)
                codes[start:stop] = self.pack(self.quantise(values[start:stop], shared, symmetric))
        payload["codes"] = torch.from_numpy(codes)
        return Encoded(normalised, payload)

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        _, cols = as_matrix(shape)
        codes = self.unpack(payload["codes"][start:stop].numpy(), cols)
        shared = self._shared(payload, params, cols, start, stop)
        return torch.from_numpy(self.dequantise(codes, shared, is_symmetric(params)))

    def decode_block(
        self, payload: Payload, shape: Shape, params: Params, rows: slice, cols: slice
    ) -> Tensor:
        packed = payload["codes"][rows, self.packed_width(cols.start) : self.packed_width(cols.stop)]
        codes, group = self.unpack(packed.numpy(), cols.stop - cols.start), group_size(params)
        shared = tuple(payload[field] for field in self.fields(is_symmetric(params)))
        if group is not None:
            groups = torch.arange(cols.start, cols.stop) // group
            shared = tuple(numbers[rows][:, groups] for numbers in shared)
        numbers = tuple(part.to(torch.float32).numpy() for part in shared)
        return torch.from_numpy(self.dequantise(codes, numbers, is_symmetric(params)))

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        self._check_shared(payload, is_symmetric(params))
        self.check_codes(payload["codes"].numpy())

    def resident(
        self, payload: Payload, shape: Shape, params: Params, device: torch.device
    ) -> Resident | None:
        """Return signs if the delta is one of signs; otherwise codes in planes, with the shared numbers as in the file.

        For lookup, ``for_kernel`` turns evenly spaced levels into planes of signs.
        """
        signs = super().resident(payload, shape, params, device)
        if signs is not None:
            return signs
        rows, cols = as_matrix(shape)
        symmetric = is_symmetric(params)
        packed = payload["codes"].numpy()
        planes = np.empty((rows, -(-cols // codes_a_byte(self.levels))), dtype=np.uint8)
        for start, stop in row_blocks(rows, cols):
            planes[start:stop] = to_planes(self.unpack(packed[start:stop], cols), self.levels)
        shared = tuple(payload[f].to(torch.float32).numpy() for f in self.fields(symmetric))
        largest = float(self.largest(shared, symmetric).max())
        fields = {**payload, "codes": torch.from_numpy(planes)}
        group = group_size(params)
        return ResidentCodes(self, fields, (rows, cols), symmetric, group, device, largest)

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Scale the shared numbers, in which levels are linear; codes do not change."""
        return scaled_fields(payload, factor, self.fields(is_symmetric(params)))

    def factor_params(self, group: int) -> Params | None:
        return self.normalise({"group_size": group, "scale_dtype": "bfloat16"}, ())

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        """Compute the norm by decoding blocks of rows."""
        blocks = row_blocks(*as_matrix(shape))
        return math.sqrt(
            math.fsum(sum_of_squares(self.decode_rows(payload, shape, params, *block)) for block in blocks)
        )

    def _solve_all(
        self, values: Floats, weights: Floats | None, group: int | None, symmetric: bool
    ) -> tuple[Floats, ...]:
        rows, cols = values.shape
        if group is None:
            return self.solve(*sampled(values, weights), symmetric)
        count = -(-cols // group)
        solved = tuple(np.empty((rows, count)) for _ in self.fields(symmetric))
        whole = cols // group
        for start, stop in row_blocks(rows, cols):
            for first, last, width in ((0, whole, group), (whole, count, cols - whole * group)):
                if first == last:
                    continue
                at = slice(first * group, first * group + (last - first) * width)
                block = values[start:stop, at].reshape(-1, width)
                wide = None
                if weights is not None:
                    wide = np.tile(weights[at].reshape(-1, width), (stop - start, 1))
                for store, part in zip(solved, self.solve(block, wide, symmetric), strict=True):
                    store[start:stop, first:last] = part.reshape(stop - start, last - first)
        return solved

    def _compensated(self, values: Floats, importance: Tensor, payload: Payload, params: Params) -> Bytes:
        rows, cols = values.shape
        symmetric, shared = is_symmetric(params), self._shared(payload, params, cols, 0, rows)

        def rounded(column: Floats, at: int) -> tuple[Bytes, Floats]:
            numbers = tuple(n[:, at : at + 1] if n.shape[-1] == cols > 1 else n for n in shared)
            codes = self.quantise(column, numbers, symmetric)
            return codes, self.dequantise(codes, numbers, symmetric)

        moments = importance.detach().to("cpu", torch.float64)
        return self.pack(compensated_codes(values, ((moments + moments.T) / 2).numpy(), rounded))

    def _shared(self, payload: Payload, params: Params, cols: int, start: int, stop: int) -> Shared:
        group = group_size(params)
        shared: list[Floats] = []
        for field in self.fields(is_symmetric(params)):
            part = payload[field] if group is None else payload[field][start:stop]
            numbers = part.to(torch.float32).numpy()
            if group is not None and group < cols:
                numbers = np.repeat(numbers, group, axis=1)[:, :cols]
            shared.append(numbers)
        return tuple(shared)

    def _check_shared(self, payload: Payload, symmetric: bool) -> None:
        for field in self.fields(symmetric):
            check_finite(payload[field], field.removesuffix("s"))
            if field.endswith("scales") and bool((payload[field] < 0).any()):
                raise CodecError(f"{field.removesuffix('s')} is negative: {float(payload[field].min())}")
        shared = tuple(payload[f].to(torch.float32).reshape(-1).numpy() for f in self.fields(symmetric))
        with np.errstate(over="ignore"):
            largest = self.largest(shared, symmetric)
        if not bool(np.isfinite(largest).all()):
            raise CodecError("a scale is so large that its largest code overflows float32")


def row_blocks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of rows of about a quarter million weights."""
    step = max(1, _BLOCK // cols)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def is_symmetric(params: Params) -> bool:
    """Return True unless the parameters set ``symmetric`` to False."""
    return bool(params.get("symmetric", 1))
