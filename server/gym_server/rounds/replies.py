"""Bounds on a reply: its references are compared with its task before a byte of them is read.

A reference of a hundred bytes stands for an object of any size, and fifty kilobytes of them for as much memory as a
machine has. An update is one delta, which nobody reads into memory here. Any other reply may expand to a small multiple
of the arrays that its task sent, since Flower's strategies get back what they gave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.records import from_wire
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb

MAX_RECORDS_BYTES = 256 << 10
"""What a reply's records may weigh; tensors are objects and do not count."""

MAX_REASON = 2_000
"""Characters of the reason that a contributor gives for an error."""

EXPANSION = 4
"""A plain reply may name so many times as many arrays, and so many times their bytes, as its task did: gradients,
control variates and moments besides the weights."""

_MIN_REFERENCES = 16
_NUMPY = "numpy.ndarray"
_HEADER_BYTES = 4096
"""What an .npy file may have besides its values."""
_MAX_DIMENSIONS = 32


def check_reply(
    task: pb.Records, reply: pb.SubmitRequest, max_bytes: int, size_of: Callable[[str], int]
) -> None:
    """Whether a reply may be kept and read.

    Args:
        task: What the contributor was sent.
        reply: Its answer.
        max_bytes: Limit on the expanded size of a plain reply (``Federation.max_update_bytes``).
        size_of: Bytes of a stored object by its sha256; raises ``NOT_FOUND``. Called for plain replies only.

    Raises:
        GymError: ``TOO_LARGE`` for more bytes, references or entries than the task allows; ``UPDATE_REFUSED`` for
            references that repeat or do not fit the objects that they name, and for what is not Flower content.
    """
    if reply.ByteSize() > MAX_RECORDS_BYTES:
        raise GymError(ErrorCode.TOO_LARGE, f"a reply of {reply.ByteSize()} bytes; tensors are objects")
    if reply.HasField("error"):
        if len(reply.error.reason) > MAX_REASON:
            raise GymError(ErrorCode.TOO_LARGE, f"a reason of more than {MAX_REASON} characters")
        return
    _check_form(reply.content)
    found = [ref for record in reply.content.arrays.values() for ref in record.arrays]
    if "update" in reply.content.configs:
        _check_update(found)
        return  # nothing is read: admission holds the manifest against the file
    _check_plain(references(task), found, max_bytes)
    for ref in found:
        _check_declared(ref)
    for ref in found:
        size = size_of(ref.sha256)
        if size != ref.size_bytes:
            raise _refused(ref, f"is declared as {ref.size_bytes} bytes, the object has {size}")


def _check_form(content: pb.Records) -> None:
    """Whether the records are Flower's, tried without the arrays' bytes."""
    try:
        from_wire(content, lambda ref: b"")
    except GymError:
        raise
    except Exception as error:  # Flower's records name no closed set of what they raise
        said = " ".join(str(error).split())[:200]
        raise GymError(
            ErrorCode.UPDATE_REFUSED, f"the reply is no Flower content: {type(error).__name__}: {said}"
        ) from error


def _check_update(found: Sequence[pb.ArrayRef]) -> None:
    if len(found) != 1 or found[0].stype != DELTA_STYPE:
        raise GymError(
            ErrorCode.UPDATE_REFUSED, f"an update names one delta and no other array, this one {len(found)}"
        )


def _check_plain(sent: Sequence[pb.ArrayRef], found: Sequence[pb.ArrayRef], max_bytes: int) -> None:
    most = max(_MIN_REFERENCES, EXPANSION * len(sent))
    if len(found) > most:
        raise GymError(
            ErrorCode.TOO_LARGE, f"a reply of {len(found)} references; its task allows {most}", "send fewer"
        )
    # A model may hold equal arrays, frozen ones above all: as often as the task names one object, a reply may too.
    repeats = max(Counter(ref.sha256 for ref in sent).values(), default=1)
    for sha256, times in Counter(ref.sha256 for ref in found).items():
        if times > repeats:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the reply names object {sha256[:12]} {times} times; its task names none more than {repeats} times",
                "name every object once",
            )
    expands = sum(ref.size_bytes for ref in found)
    task_bytes = sum(ref.size_bytes for ref in sent if ref.stype != DELTA_STYPE)
    allowed = min(max(MAX_RECORDS_BYTES, EXPANSION * task_bytes), max_bytes)
    if expands > allowed:
        raise GymError(
            ErrorCode.TOO_LARGE, f"the reply's arrays are {expands} bytes; its task allows {allowed}"
        )


def _check_declared(ref: pb.ArrayRef) -> None:
    """Whether dtype and shape are those of so many bytes; other serialisations than numpy's say nothing of theirs."""
    if ref.stype == DELTA_STYPE:
        if list(ref.shape) != [ref.size_bytes]:
            raise _refused(ref, "is a delta whose shape is not its size")
        return
    if ref.stype != _NUMPY:
        return
    if len(ref.shape) > _MAX_DIMENSIONS:
        raise _refused(ref, f"has {len(ref.shape)} dimensions")
    values = math.prod(ref.shape) * _itemsize(ref)
    if not values <= ref.size_bytes <= values + _HEADER_BYTES:
        raise _refused(ref, f"is declared as {ref.size_bytes} bytes; its shape and dtype make {values}")


def _itemsize(ref: pb.ArrayRef) -> int:
    try:
        dtype = np.dtype(ref.dtype if len(ref.dtype) <= 32 else "")
    except Exception:  # noqa: BLE001 (numpy's parser of dtypes names no closed set)
        raise _refused(ref, f"has the unknown dtype {ref.dtype[:32]!r}") from None
    if dtype.kind not in "biufcSUmM" or dtype.subdtype is not None:
        raise _refused(ref, f"has the dtype {ref.dtype[:32]!r}, which holds no plain values")
    return dtype.itemsize


def _refused(ref: pb.ArrayRef, why: str) -> GymError:
    return GymError(ErrorCode.UPDATE_REFUSED, f"array {ref.name[:80]!r} {why}")
