"""sparse_sign: the largest weights of every chunk of 4,096, each as a 12-bit index, a sign and one of two magnitudes.

Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv:2508.15706), alg. 1: top-k within
chunks, 2-bit values, error feedback; k = 64, chunks of 4,096 and a decay of 0.95 as in Covenant-72B (arXiv:2603.08163).
The two magnitudes belong to a chunk and minimise its squared error (this project). If fewer than 64 weights of a chunk
changed, its first magnitude is 0, so that no unchanged weight moves. A chunk takes 116 bytes: 0.23 bits per weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

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
from gym_quant.resident import Resident

CHUNK = 4096
"""Weights per chunk, in the order of the flattened tensor; the last chunk may be shorter."""

KEPT = 64
"""Number of weights kept per chunk; in a shorter chunk, the same share is kept, rounded up."""

_BLOCK = 256
"""Number of chunks that are encoded together, to bound memory."""

_SHIFTS = torch.arange(0, 8, 2, dtype=torch.uint8)

Numbers = NDArray[Any]


class SparseSign(Codec):
    """Payload: ``scales`` (``[chunks, 2]`` bfloat16), ``indices`` and ``codes`` (uint8); it has no parameters.

    The kept weights of all chunks are stored in ascending order. Two indices within a chunk take three bytes, least
    significant bits first. Four codes take a byte: 1 for a positive weight, plus 2 for the second magnitude. The size
    depends only on the shape.

    Merges read decoded values, which suits rules that weight whole updates. A coordinate-wise rule, such as a median,
    would see mostly zeros, so a hub refuses it with this codec.
    """

    name = "sparse_sign"
    coarse = True
    for_small = True
    sparse = True

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, (), self.name)
        return {}

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        count = math.prod(shape)
        num_kept = _num_kept(count)
        return {
            "scales": (torch.bfloat16, (-(-count // CHUNK), 2)),
            "indices": (torch.uint8, (-(-3 * num_kept // 2),)),
            "codes": (torch.uint8, (-(-num_kept // 4),)),
        }

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        shape = tuple(tensor.shape)
        self.normalise(params, shape)
        flat = to_matrix(tensor).numpy().reshape(-1)
        scales, indices, codes = [], [], []
        full = len(flat) // CHUNK * CHUNK
        blocks = [flat[i : min(i + _BLOCK * CHUNK, full)] for i in range(0, full, _BLOCK * CHUNK)]
        for block in [*(block.reshape(-1, CHUNK) for block in blocks), flat[None, full:]]:
            if block.size:
                chosen = _largest(np.abs(block), _num_kept(block.shape[1]))
                values = np.take_along_axis(block, chosen, 1)
                magnitudes = _two_magnitudes(np.abs(values))
                both = magnitudes.to(torch.float32).numpy()
                is_second = np.abs(values) > both.mean(axis=1, keepdims=True)
                scales.append(magnitudes)
                indices.append(chosen.astype(np.uint16).reshape(-1))
                codes.append(((values > 0) + 2 * is_second).astype(np.uint8).reshape(-1))
        payload = {
            "scales": torch.cat(scales),
            "indices": torch.from_numpy(_pack_indices(np.concatenate(indices))),
            "codes": torch.from_numpy(_pack_codes(np.concatenate(codes))),
        }
        check_finite(payload["scales"], "scale")
        return Encoded({}, payload)

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        return _decoded(payload, as_matrix(shape), start, stop)

    def resident(
        self, payload: Payload, shape: Shape, params: Params, device: torch.device
    ) -> ResidentSparse:
        return ResidentSparse(payload, *as_matrix(shape), device)

    def scaled(self, payload: Payload, shape: Shape, params: Params, factor: float) -> Payload:
        """Scale the magnitudes; indices and codes do not change."""
        return scaled_fields(payload, factor, ("scales",))

    def check(self, payload: Payload, shape: Shape, params: Params) -> None:
        scales, count = payload["scales"], math.prod(shape)
        check_finite(scales, "scale")
        if bool((scales < 0).any()):
            raise CodecError(f"scale is negative: {float(scales.min())}")
        num_kept = _num_kept(count)
        if num_kept % 2 and int(payload["indices"][-1]) >> 4:
            raise CodecError("indices: the unused bits of the last byte are not zero")
        if num_kept % 4 and int(payload["codes"][-1]) >> 2 * (num_kept % 4):
            raise CodecError("codes: the unused bits of the last byte are not zero")
        places, _ = _entries(payload, count, torch.arange(len(scales)))
        if int(places[-1]) >= count:
            raise CodecError(f"index {int(places[-1]) % CHUNK} is outside the last chunk")
        steps = places.diff()
        if len(steps) and int(steps.min()) <= 0:
            at = int(places[int(steps.argmin()) + 1])
            raise CodecError(f"chunk {at // CHUNK}: index {at % CHUNK} is not above the one before it")

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        chunks = torch.arange(len(payload["scales"]))
        return math.sqrt(sum_of_squares(_entries(payload, math.prod(shape), chunks)[1]))


class ResidentSparse(Resident):
    """A sparse delta in serving, packed as in the file."""

    form = "sparse"

    def __init__(self, payload: Payload, rows: int, cols: int, device: torch.device) -> None:
        self.rows, self.cols = rows, cols
        self._payload = {name: field.to(device, copy=True) for name, field in payload.items()}

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._payload.values())

    def decode_rows(self, rows: Tensor) -> Tensor:
        places = rows.long()[:, None] * self.cols + torch.arange(self.cols, device=rows.device)
        chunks, inverse = _chunks_of(rows.long(), self.rows, self.cols)
        decoded = _decoded_chunks(self._payload, self.rows * self.cols, chunks)
        return decoded[inverse[places // CHUNK], places % CHUNK]

    def decode_block(self, start: int, stop: int) -> Tensor:
        return _decoded(self._payload, (self.rows, self.cols), start, stop)


def _num_kept(count: int) -> int:
    """Return how many of ``count`` weights in consecutive chunks are kept."""
    chunks, rest = divmod(count, CHUNK)
    return chunks * KEPT + -(-rest * KEPT // CHUNK)


def _largest(magnitudes: Numbers, num_kept: int) -> Numbers:
    """Return the ascending indices ``[chunks, num_kept]`` of the largest; ties go to the first, on every machine."""
    threshold = np.partition(magnitudes, -num_kept, axis=1)[:, -num_kept, None]
    above, equal = magnitudes > threshold, magnitudes == threshold
    num_ties = num_kept - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (equal.cumsum(axis=1) <= num_ties))
    return np.asarray(np.nonzero(chosen)[1].reshape(len(magnitudes), num_kept))


def _two_magnitudes(magnitudes: Numbers) -> Tensor:
    """Return the means ``[chunks, 2]`` bfloat16 of the smaller and larger magnitudes, at the split of least error.

    If some are zero, the first magnitude is 0 and the second the mean of the larger.
    """
    ordered = np.sort(magnitudes, axis=1).astype(np.float64)
    number = np.arange(1, ordered.shape[1] + 1)
    sums = ordered.cumsum(axis=1)
    total, rest = sums[:, -1:], np.maximum(number[::-1] - 1, 1)  # the last split has no magnitude above it
    below = np.where(ordered[:, :1] > 0.0, sums, 0.0)
    at = (below**2 / number + (total - sums) ** 2 / rest).argmax(axis=1)[:, None]
    low = np.take_along_axis(below, at, 1) / number[at]
    high = (total - np.take_along_axis(sums, at, 1)) / rest[at]
    means = [low, np.where(at == len(number) - 1, low, high)]
    return torch.from_numpy(np.concatenate(means, axis=1)).to(torch.bfloat16)


def _decoded(payload: Payload, matrix: Shape, start: int, stop: int) -> Tensor:
    """Decode rows ``start`` to ``stop`` of a matrix: ``[stop - start, cols]`` float32."""
    rows, cols = matrix
    first, last = start * cols, stop * cols
    begin = first // CHUNK
    chunks = torch.arange(begin, -(-last // CHUNK), device=payload["scales"].device)
    flat = _decoded_chunks(payload, rows * cols, chunks).reshape(-1)
    return flat[first - begin * CHUNK : last - begin * CHUNK].reshape(stop - start, cols)


def _decoded_chunks(payload: Payload, count: int, chunks: Tensor) -> Tensor:
    """Decode the given chunks: ``[chunks, CHUNK]`` float32; a short last chunk ends with zeros."""
    places, values = _entries(payload, count, chunks)
    decoded = torch.zeros(len(chunks) * CHUNK, device=values.device)
    decoded[places] = values
    return decoded.reshape(-1, CHUNK)


def _chunks_of(rows: Tensor, num_rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return the distinct chunks that contain ``rows``, and for each chunk of the tensor its position among them."""
    last = ((rows + 1) * cols - 1) // CHUNK
    span = torch.arange((cols - 1) // CHUNK + 2, device=rows.device)
    needed = torch.zeros(-(-num_rows * cols // CHUNK), dtype=torch.bool, device=rows.device)
    needed[torch.minimum((rows * cols // CHUNK)[:, None] + span, last[:, None])] = True
    return needed.nonzero()[:, 0], needed.cumsum(0) - 1


def _entries(payload: Payload, count: int, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept weights of the given chunks, laid end to end: positions (int64) and values (float32)."""
    digits = (
        _by_chunk(payload["codes"], count, KEPT // 4, chunks)[..., None] >> _SHIFTS.to(chunks.device)
    ) & 3
    digits = digits.reshape(-1, KEPT).long()
    indices = _unpack_indices(_by_chunk(payload["indices"], count, KEPT // 2 * 3, chunks)).reshape(-1, KEPT)
    magnitudes = payload["scales"].float()[chunks].gather(1, digits >> 1)
    values = torch.where(digits & 1 == 1, magnitudes, -magnitudes)
    places = torch.arange(len(chunks), device=chunks.device)[:, None] * CHUNK + indices
    number = chunks[:, None] * KEPT + torch.arange(KEPT, device=chunks.device)
    used = number < _num_kept(count)  # the last chunk may have fewer
    return places[used], values[used]


def _by_chunk(field: Tensor, count: int, size: int, chunks: Tensor) -> Tensor:
    """Return the bytes ``[chunks, size]`` of the given chunks; a chunk begins at a whole byte."""
    return pad(field, (0, -(-count // CHUNK) * size - len(field))).reshape(-1, size)[chunks]


def _pack_indices(indices: Numbers) -> Numbers:
    pairs = np.append(indices, np.zeros(len(indices) % 2, np.uint16)).reshape(-1, 2)
    low, high = pairs[:, 0], pairs[:, 1]
    packed = np.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], axis=1).astype(np.uint8)
    return packed.reshape(-1)[: -(-3 * len(indices) // 2)]


def _unpack_indices(packed: Tensor) -> Tensor:
    triples = packed.reshape(-1, 3).long()
    low = triples[:, 0] | (triples[:, 1] & 15) << 8
    high = triples[:, 1] >> 4 | triples[:, 2] << 4
    return torch.stack([low, high], dim=1)


def _pack_codes(codes: Numbers) -> Numbers:
    fours = np.append(codes, np.zeros(-len(codes) % 4, np.uint8)).reshape(-1, 4)
    packed: Numbers = (fours << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1).astype(np.uint8)
    return packed
