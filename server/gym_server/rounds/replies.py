"""Limits on replies: references are compared with the task before any of their bytes are read.

A reference of a hundred bytes can name an object of any size, so fifty kilobytes of references could exhaust the
memory. An update is one delta, which is not read into memory here. Any other reply may expand to a small multiple of
the arrays that its task sent, since Flower's clients return the arrays that they received.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.records import from_wire
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb

MAX_RECORDS_BYTES = 256 << 10
"""Maximum size of a reply's records, in bytes; tensors are objects and do not count."""

MAX_REASON = 2_000
"""Maximum length of the reason that a contributor gives for an error, in characters."""

EXPANSION = 4
"""Maximum number of arrays, and of bytes, of a plain reply as a multiple of its task's: replies may contain gradients,
control variates and moments in addition to the weights.
"""

_MIN_REFERENCES = 16
_NUMPY = "numpy.ndarray"
_HEADER_BYTES = 4096
"""Maximum size of an .npy file's header, in bytes."""
_MAX_DIMENSIONS = 32


def check_reply(
    task: pb.Records, reply: pb.SubmitRequest, max_bytes: int, size_of: Callable[[str], int]
) -> None:
    """Check that a reply may be stored and read.

    Args:
        task: Content of the task that the contributor received.
        reply: Its answer.
        max_bytes: Limit on the expanded size of a plain reply (``Federation.max_update_bytes``).
        size_of: Returns the size in bytes of a stored object by its sha256; raises ``NOT_FOUND``. Called only for plain
            replies.

    Raises:
        GymError: ``TOO_LARGE`` for more bytes, references or entries than the task allows; ``UPDATE_REFUSED`` for
            references that repeat or do not match their objects, and for content that is not valid Flower content.
    """
    if reply.ByteSize() > MAX_RECORDS_BYTES:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"a reply of {counted(reply.ByteSize(), 'byte')} is too large; send tensors as objects",
        )
    if reply.HasField("error"):
        if len(reply.error.reason) > MAX_REASON:
            raise GymError(ErrorCode.TOO_LARGE, f"the reason has more than {MAX_REASON} characters")
        return
    _check_form(reply.content)
    found = [ref for record in reply.content.arrays.values() for ref in record.arrays]
    if "update" in reply.content.configs:
        _check_update(found)
        return  # nothing is read: admission compares the manifest with the file
    _check_plain(references(task), found, max_bytes)
    for ref in found:
        _check_declared(ref)
    for ref in found:
        size = size_of(ref.sha256)
        if size != ref.size_bytes:
            raise _refused(
                ref, f"is declared as {counted(ref.size_bytes, 'byte')}, but the object has {size}"
            )


def _check_form(content: pb.Records) -> None:
    """Check that the records are valid Flower content, without reading the arrays' bytes."""
    try:
        from_wire(content, lambda ref: b"")
    except GymError:
        raise
    except Exception as error:  # Flower's parsers raise no fixed set of exceptions
        reason = " ".join(str(error).split())[:200]
        raise GymError(
            ErrorCode.UPDATE_REFUSED, f"the reply is not Flower content: {type(error).__name__}: {reason}"
        ) from error


def _check_update(found: Sequence[pb.ArrayRef]) -> None:
    if len(found) != 1 or found[0].stype != DELTA_STYPE:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"an update must contain exactly one delta; this one contains {len(found)}",
        )


def _check_plain(sent: Sequence[pb.ArrayRef], found: Sequence[pb.ArrayRef], max_bytes: int) -> None:
    most = max(_MIN_REFERENCES, EXPANSION * len(sent))
    if len(found) > most:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the reply has {len(found)} references; its task allows {most}",
            "send fewer",
        )
    # A model may contain equal arrays, mostly frozen ones, so a reply may repeat an object as often as the task does.
    repeats = max(Counter(ref.sha256 for ref in sent).values(), default=1)
    for sha256, times in Counter(ref.sha256 for ref in found).items():
        if times > repeats:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the reply refers to object {sha256[:12]} {counted(times, 'time')}; its task refers to an object at "
                f"most {counted(repeats, 'time')}",
                "refer to every object once",
            )
    expands = sum(ref.size_bytes for ref in found)
    task_bytes = sum(ref.size_bytes for ref in sent if ref.stype != DELTA_STYPE)
    allowed = min(max(MAX_RECORDS_BYTES, EXPANSION * task_bytes), max_bytes)
    if expands > allowed:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the reply's arrays have {counted(expands, 'byte')}; its task allows {allowed}",
        )


def _check_declared(ref: pb.ArrayRef) -> None:
    """Check that dtype and shape match the size in bytes; only numpy's serialisation can be checked."""
    if ref.stype == DELTA_STYPE:
        if list(ref.shape) != [ref.size_bytes]:
            raise _refused(ref, "is a delta whose shape is not its size in bytes")
        return
    if ref.stype != _NUMPY:
        return
    if len(ref.shape) > _MAX_DIMENSIONS:
        raise _refused(ref, f"has {len(ref.shape)} dimensions")
    values = math.prod(ref.shape) * _itemsize(ref)
    if not values <= ref.size_bytes <= values + _HEADER_BYTES:
        raise _refused(
            ref, f"is declared as {counted(ref.size_bytes, 'byte')}; its shape and dtype make {values}"
        )


def _itemsize(ref: pb.ArrayRef) -> int:
    try:
        dtype = np.dtype(ref.dtype if len(ref.dtype) <= 32 else "")
    except Exception:  # noqa: BLE001 (numpy's dtype parser raises no fixed set of exceptions)
        raise _refused(ref, f"has the unknown dtype {ref.dtype[:32]!r}") from None
    if dtype.kind not in "biufcSUmM" or dtype.subdtype is not None:
        raise _refused(ref, f"has the dtype {ref.dtype[:32]!r}, which has no plain values")
    return dtype.itemsize


def _refused(ref: pb.ArrayRef, why: str) -> GymError:
    return GymError(ErrorCode.UPDATE_REFUSED, f"array {ref.name[:80]!r} {why}")
