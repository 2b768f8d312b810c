"""Versions as a base plus an integer sum: soups whose codec adds up (``Codec.adds_up``) are added as integers.

A version is its base plus ``2**exponent`` times the sum of all codes since then, rounded once to float32. So it does
not depend on the path: soups one by one, several of them combined, and one sum of all give the same tensors and the
same digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gym_quant.codec import CodecError
from gym_quant.grid import Integers
from gym_quant.integers import IntegerCodec
from gym_quant.registry import CODECS, get_codec
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json
from gym_fed.delta.base import BaseSpec, Tensors, model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta

_MAX = (1 << 31) - 1
_MAX_EXPONENT = 100
"""Largest exponent that is written."""
_DTYPES = (torch.int8, torch.int16, torch.int32)


class IntegerSum:
    """A sum of deltas that add up. In memory it takes one to four bytes per weight."""

    def __init__(self) -> None:
        self._sums: dict[str, Integers] = {}

    @classmethod
    def of(cls, *deltas: DeltaFile) -> IntegerSum:
        """Add up deltas; errors as ``add``."""
        total = cls()
        for delta in deltas:
            total.add(delta)
        return total

    def add(self, delta: DeltaFile, sign: int = 1) -> None:
        """Add a delta, or subtract it with ``sign`` -1, on the finer of both grids.

        Raises:
            GymError: ``DELTA_INVALID`` naming the tensor that does not consist of integers, has a different shape, or
                whose sum exceeds 31 bits.
        """
        for name in delta.names:
            added = delta.integers(name)
            if added is None:
                raise _invalid(delta, name, "is not integers times a power of two")
            current = self._sums.get(name, Integers(torch.zeros_like(added.codes), added.exponent))
            if current.codes.shape != added.codes.shape:
                shapes = f"{list(added.codes.shape)}, not {list(current.codes.shape)}"
                raise _invalid(delta, name, f"has shape {shapes}")
            exponent = min(current.exponent, added.exponent)
            try:
                codes = _shifted(current, exponent) + sign * _shifted(added, exponent)
                self._sums[name] = Integers(_narrow(codes), exponent)
            except OverflowError:
                raise _invalid(delta, name, "has a sum of more than 31 bits") from None
            delta.release(name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that was added, by name."""
        return {name: tuple(held.codes.shape) for name, held in self._sums.items()}

    def digest(self) -> str:
        """Return ``sha256:<hex>`` of the sum, which does not depend on its grids.

        Hashed are, for every tensor that is not zero and in order of name: the canonical JSON of
        ``[name, shape, exponent]``, its length before it as eight little-endian bytes, and the codes as little-endian
        int32, with the largest exponent up to 100 at which they are whole numbers.
        """
        digest = hashlib.sha256()
        for name, codes, exponent in self._reduced():
            head = canonical_json([name, list(codes.shape), exponent])
            digest.update(len(head).to_bytes(8, "little") + head)
            digest.update(codes.numpy().astype("<i4").tobytes())
        return f"sha256:{digest.hexdigest()}"

    def write(self, path: Path, spec: BaseSpec, extra: Mapping[str, str] | None = None) -> DeltaInfo:
        """Write the sum as a delta of ``spec`` that adds up."""
        codec = get_codec(CODECS.own_with("adds_up")[0])
        assert isinstance(codec, IntegerCodec)
        entries = []
        for name, codes, exponent in self._reduced():
            try:
                encoded = codec.encode_integers(codes.to(torch.int64), exponent)
            except CodecError as error:
                raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
            shape, copied = tuple(codes.shape), functools.partial(dict[str, Tensor], encoded.payload)
            entries.append(DeltaEntry(name, shape, codec.name, encoded.params, copied))
        return write_delta(path, entries, spec, extra)

    def apply(self, model: Tensors) -> None:
        """Add the sum to the tensors of its base in place, rounding once.

        Raises:
            GymError: ``BASE_MISMATCH`` naming a tensor that the model lacks, before anything is changed.
        """
        tensors = model_tensors(model)
        for name, held in self._sums.items():
            if name not in tensors or tensors[name].shape != held.codes.shape:
                raise GymError(
                    ErrorCode.BASE_MISMATCH,
                    f"the sum's tensor {name!r} {list(held.codes.shape)} does not match the model",
                )
        with torch.no_grad():
            for name, held in self._sums.items():
                change = held.codes.to(torch.float64).mul_(2.0**held.exponent)
                tensors[name].copy_(tensors[name].to(torch.float64) + change.to(tensors[name].device))

    def _reduced(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, codes and exponent of the tensors that are not zero, on their coarsest grid."""
        for name, held in sorted(self._sums.items()):
            bits = int(np.bitwise_or.reduce(np.abs(held.codes.numpy().astype(np.int64)), axis=None))
            if bits:
                zeros = min((bits & -bits).bit_length() - 1, max(0, _MAX_EXPONENT - held.exponent))
                yield name, held.codes >> zeros, held.exponent + zeros


def read_sum(files: Iterable[tuple[Path, BaseSpec]], digest: str) -> IntegerSum:
    """Add up the deltas in files.

    Args:
        files: Files with the versions that they start from.
        digest: ``IntegerSum.digest`` of the sum, from the version that it leads to.

    Raises:
        GymError: ``DELTA_INVALID``, or ``BASE_MISMATCH`` if the sum differs.
    """
    total = IntegerSum()
    for path, spec in files:
        with DeltaFile.open(path, spec) as delta:
            total.add(delta)
    require_sum(total, digest)
    return total


def require_sum(total: IntegerSum, digest: str) -> None:
    """Raise ``BASE_MISMATCH`` unless a sum has this digest."""
    if total.digest() != digest:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"the sum of the soups has digest {total.digest()}, but the version says {digest}",
            "the hub sent soups other than those of its version: ask its coordinator to run `gym-server ledger verify`",
        )


def _shifted(held: Integers, exponent: int) -> Tensor:
    codes, shift = held.codes.to(torch.int64), held.exponent - exponent
    if shift > 31 and bool(codes.any()):
        raise OverflowError
    return codes << min(shift, 31)


def _narrow(codes: Tensor) -> Tensor:
    """Return the codes in the smallest dtype that holds them."""
    largest = int(codes.abs().max())
    if largest > _MAX:
        raise OverflowError
    return codes.to(next(dtype for dtype in _DTYPES if largest <= torch.iinfo(dtype).max))


def _invalid(delta: DeltaFile, name: str, why: str) -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, f"{delta.path}: tensor {name!r} {why}")
