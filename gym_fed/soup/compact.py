"""Write a merged delta in the fewest bytes per tensor that stay within an error bound, and report that error.

No single codec fits every merged tensor. Sign bits of two updates average to three levels, trimmed updates to many
zeros, LoRA factors to stacked factors, and a majority vote gives sign bits again. So each tensor gets the smallest
encoding of ``menu`` whose relative error, measured on the tensor itself, is within a bound. (This project.)
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gym_quant.codec import ROW, CodecError, Encoded, Params, Payload, Shape, as_matrix, sum_of_squares
from gym_quant.codecs.lora import Lora
from gym_quant.registry import CODECS, get_codec
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta

EXACT = CodecPolicy(codec="as-merged", factors="float32", dense_dtype="float32", error_feedback=False)
"""The codec of a soup before it is compacted: float32 factors if the merge gives factors, else float32 values."""

ERROR, COARSE_ERROR = 0.01, 0.1
"""Maximum relative error of a compact soup; higher for coarse updates, whose own error is several times that."""

Menu = tuple[tuple[str, Mapping[str, int | str]], ...]
"""Ways to write a matrix: codec and parameters."""

_SMALL, _SAMPLE, _USUAL = 256, 1 << 18, (4096, 4096)


@functools.cache
def menu() -> Menu:
    """The encodings to try for a matrix besides ``EXACT``: ``Codec.compact`` of the built-in codecs, smallest first.

    Codecs of other packages are never chosen: every reader of the soup would need the package.
    """
    options = [(name, option) for name in CODECS.own() for option in get_codec(name).compact]
    return tuple(sorted(options, key=lambda option: _bytes(option[0], option[1], _USUAL)))


def values_only() -> Menu:
    """The codec for small and one-dimensional tensors: the largest one, which loses the least."""
    return menu()[-1:]


@dataclass(frozen=True)
class CompactReport:
    """The size of the compact soup and its distance from the exact one.

    Attributes:
        sha256: Lower-case hex sha256 of the file.
        size_bytes: Size of the file in bytes.
        norm: L2 norm of the decoded soup.
        bits_per_weight: Bits of the file per weight of the base.
        error: ``|decoded - exact| / |exact|`` of the entire soup; 0 for a soup of zeros.
        codecs: Number of tensors by codec.
    """

    sha256: str
    size_bytes: int
    norm: float
    bits_per_weight: float
    error: float
    codecs: dict[str, int] = field(repr=False)


def error_bound(updates: Sequence[DeltaFile]) -> float:
    """``COARSE_ERROR`` if every matrix of every update has a coarse codec (``Codec.coarse``), else ``ERROR``."""
    records = [update.record(name) for update in updates for name in update.names]
    codecs = {record.codec for record in records if not _is_small(record.shape)}
    return COARSE_ERROR if codecs and all(get_codec(name).coarse for name in codecs) else ERROR


def write_compact(
    exact: DeltaFile, out_path: Path, spec: BaseSpec, bound: float, options: Menu | None = None
) -> None:
    """Write each tensor of ``exact`` with the smallest codec within ``bound``, one tensor in memory at a time.

    Args:
        exact: The soup, written by ``EXACT``.
        out_path: The file to write.
        spec: Spec of the base.
        bound: Maximum relative error of each tensor; 0 keeps every bit.
        options: Codecs to try besides the exact soup's own, by default ``menu()``. For float32 factors, bfloat16
            factors are always tried.
    """
    options = menu() if options is None else options
    entries = []
    for name in exact.names:
        delta = exact.decode(name)
        if bool(delta.any()):
            entries.append(_smallest(exact, name, delta, bound, options))
        exact.release(name)
    write_delta(out_path, entries, spec, exact.manifest.extra)


def compared(soup: DeltaFile, exact: DeltaFile) -> CompactReport:
    """Compare ``exact`` with its encoding ``soup``; both are open and have the same base."""
    wrong = true = encoded_square = 0.0
    for name in sorted({*exact.names, *soup.names}):
        truth = exact.decode(name) if name in exact else soup.decode(name).zero_()
        decoded = soup.decode(name) if name in soup else truth.new_zeros(truth.shape)
        true, encoded_square = true + sum_of_squares(truth), encoded_square + sum_of_squares(decoded)
        wrong += sum_of_squares(decoded.sub_(truth))
    error = math.sqrt(wrong / true) if true else 0.0
    codecs = Counter(soup.record(name).codec for name in soup.names)
    return CompactReport(
        soup.sha256(), soup.size_bytes, math.sqrt(encoded_square), soup.bits_per_weight, error, dict(codecs)
    )


@dataclass(frozen=True)
class _Option:
    """A codec and its parameters for one tensor; ``factors`` are the exact soup's float32 factors."""

    codec: str
    params: Params
    factors: tuple[Tensor, Tensor] | None = None

    def encode(self, delta: Tensor) -> Encoded:
        if self.factors is not None:
            return Lora().encode_factors(*self.factors, factors="bfloat16")
        return get_codec(self.codec).encode(delta, **self.params)

    def error(self, delta: Tensor) -> float:
        """The relative error; infinite if the tensor does not fit the codec's number format."""
        try:
            encoded = self.encode(delta)
        except CodecError:
            return math.inf
        decoded = get_codec(self.codec).decode(encoded.payload, tuple(delta.shape), encoded.params)
        true = sum_of_squares(delta)
        return math.sqrt(sum_of_squares(decoded.sub_(delta)) / true) if true else 0.0


def _smallest(exact: DeltaFile, name: str, delta: Tensor, bound: float, options: Menu) -> DeltaEntry:
    record = exact.record(name)
    rows, cols = as_matrix(record.shape)
    sample = delta.reshape(rows, cols)[:: -(-rows * cols // _SAMPLE)].contiguous()
    for option in _options(exact, name, options):
        if option.factors is None and option.error(sample) > 1.1 * bound:
            continue  # most options fail by far, which a sample of rows shows
        if option.error(delta) <= bound:
            return DeltaEntry(
                name,
                record.shape,
                option.codec,
                option.params,
                functools.partial(_encoded, option, exact, name),
            )
    return DeltaEntry(name, record.shape, record.codec, record.params, lambda: exact.payload(name))


def _encoded(option: _Option, exact: DeltaFile, name: str) -> Payload:
    return option.encode(exact.decode(name)).payload


def _options(exact: DeltaFile, name: str, options: Menu) -> list[_Option]:
    """The encodings smaller than the tensor itself, smallest first."""
    record = exact.record(name)

    def size(option: _Option) -> int:
        return get_codec(option.codec).payload_bytes(record.shape, option.params)

    smaller = [
        option for option in _all_options(exact, name, options) if size(option) < exact.payload_bytes(name)
    ]
    return sorted(smaller, key=size)


def _all_options(exact: DeltaFile, name: str, options: Menu) -> Iterator[_Option]:
    record = exact.record(name)
    factors = get_codec(record.codec).factors(exact.payload(name), record.shape, record.params)
    if factors is not None:
        yield _Option("lora", Lora().normalise({"rank": len(factors[0])}, record.shape), factors)
    for codec, settings in options[-1:] if _is_small(record.shape) else options:
        yield _Option(codec, _params(codec, settings, record.shape))


def _params(codec: str, settings: Mapping[str, int | str], shape: Shape) -> Params:
    cols = as_matrix(shape)[1]
    params = {key: cols if value == ROW else value for key, value in settings.items()}
    return get_codec(codec).normalise(params, shape)


def _bytes(codec: str, settings: Mapping[str, int | str], shape: Shape) -> int:
    return get_codec(codec).payload_bytes(shape, _params(codec, settings, shape))


def _is_small(shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or math.prod(shape) <= _SMALL
