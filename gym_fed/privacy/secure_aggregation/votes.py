"""Sign votes as a file of masked integers, and the sum of such files modulo 2^k.

A vote is the sign of one coordinate of the decoded update: 1, -1, or 0 for an abstention (a tensor that the update
lacks, or a dense zero). The bits of ``bitdelta`` are votes without conversion. With n voters, a sum is in [-n, n].
Numbers modulo 2^k have room for it, and for ``fold``, if 2^k is at least 4n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file
from gym_fed.core.text import counted
from gym_fed.privacy.secure_aggregation.keys import MAX_BITS, Mask, MaskSum, Words, word_type

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile

MAGIC = b"gymvotes"
HEADER_BYTES = 24
PIECE = 1 << 20
"""Maximum number of coordinates in memory at a time; a multiple of eight."""


def bits_for(voters: int) -> int:
    """Return k, the number of bits per masked coordinate.

    Raises:
        GymError: ``CONFIG_INVALID`` if there are too many voters for 16 bits.
    """
    bits = (4 * voters - 1).bit_length()
    if bits > MAX_BITS:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{counted(voters, 'contributor')} in one secure round; at most {1 << MAX_BITS - 2} fit",
        )
    return bits


def masked_bytes(spec: BaseSpec, bits: int) -> int:
    """Return the size in bytes of a file of masked votes; each tensor is padded to a multiple of eight coordinates."""
    return HEADER_BYTES + sum(_groups(math.prod(shape)) * bits for shape in spec.shapes.values())


def write_masked(delta: DeltaFile, spec: BaseSpec, masks: Sequence[Mask], bits: int, path: Path) -> None:
    """Write the masked votes of an update to ``path`` atomically."""
    stream = MaskSum(masks, bits)
    with atomic_file(path, mode=0o600) as file:
        file.write(_header(bits, spec))
        for name in sorted(spec.shapes):
            votes = signs(delta, name, spec)
            for start in range(0, len(votes), PIECE):
                piece = votes[start : start + PIECE]
                words = stream.take(8 * _groups(len(piece)))
                words[: len(piece)] += piece.astype(words.dtype)
                file.write(_pack(words, bits))


def signs(delta: DeltaFile, name: str, spec: BaseSpec) -> NDArray[np.int8]:
    """Return the votes of one tensor, flattened to ``[size]`` int8."""
    if name not in delta:
        return np.zeros(math.prod(spec.shapes[name]), np.int8)
    decoded = delta.decode(name).sign().reshape(-1)
    delta.release(name)
    votes: NDArray[np.int8] = decoded.numpy().astype(np.int8)
    return votes


def check_masked(path: Path, spec: BaseSpec, bits: int) -> None:
    """Check that a file has the layout of masked votes for this base and width. Its content cannot be checked.

    Raises:
        GymError: ``UPDATE_REFUSED`` otherwise.
    """
    size, expected = path.stat().st_size, masked_bytes(spec, bits)
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if head != _header(bits, spec) or size != expected:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"not a file of masked votes: {counted(size, 'byte')}, but {counted(bits, 'bit')} per coordinate "
            f"take {expected}",
            "this hub uses secure aggregation and accepts only masked votes",
        )


def sum_masked(
    paths: Sequence[Path], spec: BaseSpec, masks: Sequence[Mask], bits: int
) -> Iterator[tuple[str, NDArray[np.int16]]]:
    """Sum the files and the ``masks``, tensor by tensor in order of name.

    The sum can have any value, since masked content cannot be checked. Call ``require_votes`` or ``fold`` on the
    result.

    Args:
        paths: Files of masked votes.
        spec: Spec of the base.
        masks: Inverses of the masks that do not cancel in the sum.
        bits: Number of bits per coordinate, k.

    Yields:
        The name and the ``[size]`` int16 sums modulo 2^k, as the representatives nearest to zero.

    Raises:
        GymError: ``UPDATE_REFUSED`` for a file that does not contain masked votes.
    """
    stream = MaskSum(masks, bits)
    for path in paths:
        check_masked(path, spec, bits)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for file in files:
            file.seek(HEADER_BYTES)
        for name, shape in sorted(spec.shapes.items()):
            total = np.zeros(math.prod(shape), np.int16)
            for start in range(0, len(total), PIECE):
                piece = total[start : start + PIECE]
                words = stream.take(8 * _groups(len(piece)))
                for file in files:
                    words += _unpack(file, len(words), bits)
                piece[:] = _centred(words[: len(piece)], bits)
            yield name, total


def require_votes(name: str, total: NDArray[np.int16], voters: int) -> None:
    """Raise ``UPDATE_REFUSED`` for a sum that no votes can produce.

    Use this only in rounds without noise, since the outcome reveals something about the exact sum.
    """
    most = int(np.abs(total.astype(np.int32)).max(initial=0))
    if most > voters:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"tensor {name!r}: the sum of {voters} votes is {most} at some coordinate",
            "a contributor sent values that are not votes; secure aggregation hides which one",
        )


def fold(total: NDArray[np.int16], bits: int) -> NDArray[np.int64]:
    """Map ``[size]`` sums modulo 2^k to integers such that one vote changes each by at most one, for any input.

    The map is a triangular wave: the identity within [-2^(k-2), 2^(k-2)], and back towards zero outside, so that the
    step from 2^(k-1) - 1 to -2^(k-1) also has size one. Sums of votes are unchanged, since n is at most 2^(k-2).
    Without the map, a malicious client could place a coordinate next to the wrap-around or the limit of valid sums. One
    honest vote would then change the result by more than the noise covers.
    """
    wide = total.astype(np.int64)
    quarter = 1 << (bits - 2)
    beyond = np.sign(wide) * 2 * quarter - wide
    return np.where(np.abs(wide) > quarter, beyond, wide)


def _groups(count: int) -> int:
    return -(-count // 8)


def _header(bits: int, spec: BaseSpec) -> bytes:
    return MAGIC + bits.to_bytes(8, "little") + spec.num_parameters.to_bytes(8, "little")


def _pack(words: Words, bits: int) -> bytes:
    """Pack words into k bits each, lowest bits first; eight words take k bytes."""
    shifts = np.arange(bits, dtype=words.dtype)
    return np.packbits(((words[:, None] >> shifts) & 1).astype(np.uint8), bitorder="little").tobytes()


def _unpack(file: BinaryIO, count: int, bits: int) -> Words:
    dtype = word_type(bits)
    data = np.frombuffer(file.read(count * bits // 8), np.uint8)
    ones = np.unpackbits(data, bitorder="little").reshape(count, bits).astype(dtype)
    words: Words = (ones << np.arange(bits, dtype=dtype)).sum(axis=1, dtype=dtype)
    return words


def _centred(words: Words, bits: int) -> NDArray[np.int16]:
    """Map numbers modulo 2^k to the representatives nearest to zero."""
    low = (words & ((1 << bits) - 1)).astype(np.int32)
    return np.where(low >= 1 << (bits - 1), low - (1 << bits), low).astype(np.int16)
