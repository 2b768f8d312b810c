"""Write a delta in the fewest bytes per tensor that stay within an error bound, and report that error.

No single codec fits every tensor. A majority vote gives sign bits, trimming mostly zeros, and LoRA factors.
Sums of sign bits have few levels, whose entropy the lattice comes close to, and a fine-tune is smallest in 8 bits. So
each tensor gets the smallest encoding whose relative error, measured on the tensor itself, is within a bound. (This
project.)
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gym_quant.codec import ROW, CodecError, Encoded, Params, Payload, Shape, as_matrix, sum_of_squares
from gym_quant.codecs.lora import Lora
from gym_quant.integers import IntegerCodec
from gym_quant.registry import CODECS, get_codec
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import EncodeReport, TensorReport, lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.kept import MIN_KEPT
from gym_fed.delta.low_rank import Factors
from gym_fed.delta.writer import DeltaEntry, write_delta

EXACT = CodecPolicy(codec="as-merged", factors="float32", dense_dtype="float32", error_feedback=False)
"""The codec of a delta before it is compacted: float32 factors if there are factors, else float32 values."""

ERROR = 1.0 - MIN_KEPT
"""Maximum relative error of each tensor of a compact delta."""

Menu = tuple[tuple[str, Mapping[str, int | str]], ...]
"""Ways to write a matrix: codec and parameters."""

_SMALL, _SAMPLE, _USUAL = 256, 1 << 18, (4096, 4096)

VALUES: Menu = (("dense", {"dtype": "bfloat16"}),)
"""The codec policy for small and one-dimensional tensors, and for soups that keep the form of the merge."""


@functools.cache
def menu() -> Menu:
    """Return the encodings to try for a matrix besides ``EXACT``: ``Codec.compact`` of built-in codecs, smallest first.

    Codecs of other packages are never chosen: every reader of the file would need the package.
    """
    options = [(name, option) for name in CODECS.own() for option in get_codec(name).compact]
    return tuple(sorted(options, key=lambda option: _bytes(option[0], option[1], _USUAL)))


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


def write_compact(
    exact: DeltaFile, out_path: Path, spec: BaseSpec, bound: float = ERROR, options: Menu | None = None
) -> None:
    """Write each tensor of ``exact`` with the smallest codec within ``bound``, one tensor in memory at a time.

    Args:
        exact: The delta, written by ``EXACT``.
        out_path: The file to write.
        spec: Spec of the base.
        bound: Maximum relative error of each tensor; 0 keeps every bit.
        options: Codecs to try besides the exact delta's own, by default ``menu()``. For float32 factors, bfloat16
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


def encode_compact(
    factors: Mapping[str, Factors],
    values: Mapping[str, Tensor],
    out_path: Path,
    spec: BaseSpec,
    bound: float = ERROR,
) -> EncodeReport:
    """Write a fine-tune's change with the smallest codec per tensor (``write_compact``).

    Args:
        factors: LoRA factors by tensor name, as ``lora_delta`` takes them.
        values: Changes of all other tensors.
        out_path: The file to write; its folder also holds the exact file meanwhile.
        spec: Spec of the base.
        bound: Maximum relative error of each tensor.

    Raises:
        GymError: ``DELTA_INVALID`` naming a tensor that does not fit the base or is not finite.
    """
    with tempfile.TemporaryDirectory(prefix=f".{out_path.name}.", dir=out_path.parent) as folder:
        exact_path = Path(folder) / "exact.gymdelta"
        exactly = lora_delta(factors, exact_path, spec, policy=EXACT, values=values)
        with DeltaFile.open(exact_path, spec) as exact:
            write_compact(exact, out_path, spec, bound)
    with DeltaFile.open(out_path, spec) as file:
        why = f"compact: the smallest with an error of at most {bound:.2%}"
        tensors = tuple(
            TensorReport(t.name, file.record(t.name).codec, why, file.payload_bytes(t.name), t.energy)
            for t in exactly.tensors
            if t.name in file
        )
        return EncodeReport(file.sha256(), file.size_bytes, file.norm(), file.bits_per_weight, tensors)


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
    """Return a codec and its parameters for one tensor; ``factors`` are the exact soup's float32 factors."""

    codec: str
    params: Params
    factors: tuple[Tensor, Tensor] | None = None

    def encode(self, delta: Tensor) -> Encoded:
        if self.factors is not None:
            scaling = Lora().scaling(self.params)
            return Lora().encode_factors(*self.factors, scaling=scaling, factors="bfloat16")
        return get_codec(self.codec).encode(delta, **self.params)

    def error(self, delta: Tensor) -> float:
        """Return the relative error; infinite if the tensor does not fit the codec's number format."""
        try:
            encoded = self.encode(delta)
        except CodecError:
            return math.inf
        decoded = get_codec(self.codec).decode(encoded.payload, tuple(delta.shape), encoded.params)
        true = sum_of_squares(delta)
        return math.sqrt(sum_of_squares(decoded.sub_(delta)) / true) if true else 0.0


def _smallest(exact: DeltaFile, name: str, delta: Tensor, bound: float, options: Menu) -> DeltaEntry:
    record = exact.record(name)
    options = VALUES if _is_small(record.shape) else options
    smallest = _smallest_of_known_size(exact, name, delta, bound, options)
    for codec, _ in options:
        member = get_codec(codec)
        if (
            not isinstance(member, IntegerCodec)
            or bound == 0.0
            or 8 * _entry_bytes(smallest) <= delta.numel()
        ):
            continue
        try:
            params = member.encode_within(delta, bound).params
        except CodecError:
            continue
        if member.payload_bytes(record.shape, params) < _entry_bytes(smallest):
            payload = functools.partial(_within, member, exact, name, bound)
            smallest = DeltaEntry(name, record.shape, codec, params, payload)
    return smallest


def _smallest_of_known_size(
    exact: DeltaFile, name: str, delta: Tensor, bound: float, options: Menu
) -> DeltaEntry:
    record = exact.record(name)
    rows, cols = as_matrix(record.shape)
    sample = delta.reshape(rows, cols)[:: -(-rows * cols // _SAMPLE)].contiguous()
    for option in _options(exact, name, options):
        if option.factors is None and option.error(sample) > 1.1 * bound:
            continue  # most options exceed the bound by far, which a sample of rows shows
        if option.error(delta) <= bound:
            payload = functools.partial(_encoded, option, exact, name)
            return DeltaEntry(name, record.shape, option.codec, option.params, payload)
    return DeltaEntry(name, record.shape, record.codec, record.params, lambda: exact.payload(name))


def _within(codec: IntegerCodec, exact: DeltaFile, name: str, bound: float) -> Payload:
    return codec.encode_within(exact.decode(name), bound).payload


def _encoded(option: _Option, exact: DeltaFile, name: str) -> Payload:
    return option.encode(exact.decode(name)).payload


def _options(exact: DeltaFile, name: str, options: Menu) -> list[_Option]:
    """Return the encodings that are smaller than the tensor itself, smallest first."""
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
        scaling = get_codec(record.codec).scaling(record.params)
        params = Lora().normalise({"rank": len(factors[0]), "scaling": scaling}, record.shape)
        yield _Option("lora", params, factors)
    for codec, settings in options:
        yield _Option(codec, _params(codec, settings, record.shape))


def _params(codec: str, settings: Mapping[str, int | str], shape: Shape) -> Params:
    cols = as_matrix(shape)[1]
    params = {key: cols if value == ROW else value for key, value in settings.items()}
    return get_codec(codec).normalise(params, shape)


def _bytes(codec: str, settings: Mapping[str, int | str], shape: Shape) -> int:
    return get_codec(codec).payload_bytes(shape, _params(codec, settings, shape))


def _entry_bytes(entry: DeltaEntry) -> int:
    return get_codec(entry.codec).payload_bytes(entry.shape, entry.params)


def _is_small(shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or math.prod(shape) <= _SMALL
