"""Parse untrusted replies of a Flower app's clients; no content can end the run or exhaust the server's memory."""

from __future__ import annotations

import io
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from flwr.app import Array, MetricRecord, RecordDict

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

log = logging.getLogger("gym_server")

_STYPE = "numpy.ndarray"
_HEADER_LIMIT = 1024


def read_array(key: str, array: Array, sent: np.ndarray) -> np.ndarray:
    """Return the values of a received array, as a view of its bytes.

    ``numpy.load`` is not used, since it also reads zip archives, and allocates the size claimed in a header before
    reading that many bytes.

    Args:
        key: Name of the array, for messages.
        array: The array from Flower.
        sent: The array that was sent to the client.

    Returns:
        An array in the shape of ``sent``; bool if ``sent`` is bool, else any float or integer dtype.

    Raises:
        GymError: ``UPDATE_REFUSED`` for any other shape or dtype, or bytes that are not such an array.
    """
    with _refusing(f"array {key!r}"):
        if array.stype != _STYPE:
            raise _refusal(f"array {key!r} is serialised as {array.stype[:80]!r}, not {_STYPE!r}")
        header = io.BytesIO(array.data)
        version = np.lib.format.read_magic(header)
        if version != (1, 0):  # the format version that numpy.save uses for arrays of plain numbers
            raise _refusal(f"array {key!r} is a file of version {version}, not (1, 0)")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(header, max_header_size=_HEADER_LIMIT)
        if shape != sent.shape or tuple(array.shape) != sent.shape or not _fits(dtype, sent.dtype):
            raise _refusal(f"array {key!r} is {dtype} {list(shape)}, not {sent.dtype} {list(sent.shape)}")
        if np.dtype(array.dtype).name != dtype.name:
            raise _refusal(f"array {key!r} is declared as {array.dtype[:80]!r} but contains {dtype}")
        held, due = len(array.data) - header.tell(), sent.size * dtype.itemsize
        if held != due:
            raise _refusal(f"array {key!r} has {counted(held, 'byte')}, not {due}")
        values = np.frombuffer(array.data, dtype, offset=header.tell())
        return values.reshape(shape, order="F" if fortran else "C")


def read_metrics(content: RecordDict, weighted_by: str) -> float:
    """Check that Flower's functions can process a reply's metrics, and return the weight that it claims.

    Args:
        content: Content of the reply.
        weighted_by: Key of the metric that holds the weight.

    Raises:
        GymError: ``UPDATE_REFUSED`` unless there is one metric record, of numbers and lists of numbers, with a
            finite positive number under ``weighted_by``.
    """
    with _refusing("its metric record"):
        records = list(content.metric_records.values())
        if len(records) != 1:
            raise _refusal(f"it has {counted(len(records), 'metric record')}, not one")
        for key, value in records[0].items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise _refusal(f"metric {key!r} contains something that is not a number")
                float(number)  # raises OverflowError for an integer too large for a mean
        claimed = records[0].get(weighted_by)
        if not isinstance(claimed, int | float) or not (math.isfinite(claimed) and claimed > 0):
            raise _refusal(f"its {weighted_by!r} is not a finite positive number")
        return float(claimed)


def comparable(contents: Sequence[RecordDict]) -> list[RecordDict]:
    """Return replies whose metrics can be merged: keys that all replies have in the same form, under one record name.

    Args:
        contents: Contents of replies, each accepted by ``read_metrics``; not changed.

    Returns:
        The contents, without other keys in the metric records; removed keys are logged.
    """
    named = [next(iter(content.metric_records.items())) for content in contents]
    if not named:
        return []
    name = Counter(name for name, _ in named).most_common(1)[0][0]
    forms = [{key: _form(value) for key, value in record.items()} for _, record in named]
    kept = [key for key, form in forms[0].items() if all(other.get(key) == form for other in forms)]
    dropped = sorted({key for form in forms for key in form} - set(kept))
    if dropped:
        log.warning("metrics that are missing or have another form in some replies are left out: %s", dropped)
    same = []
    for content, (own, record) in zip(contents, named, strict=True):
        if own == name and len(record) == len(kept):
            same.append(content)
            continue
        others = {key: value for key, value in content.items() if key != own}
        same.append(RecordDict({**others, name: MetricRecord({key: record[key] for key in kept})}))
    return same


def _form(value: object) -> int:
    """Return the length of a list; -1 for a number."""
    return len(value) if isinstance(value, list) else -1


def _fits(dtype: np.dtype[np.generic], sent: np.dtype[np.generic]) -> bool:
    """Return True if the difference of the two dtypes is defined; unlike in numpy, timedelta64 is not an integer."""
    return dtype == sent if sent.kind == "b" else dtype.kind in "fiu"


def _refusal(message: str) -> GymError:
    return GymError(ErrorCode.UPDATE_REFUSED, message)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Convert any exception inside the block to the refusal of one reply.

    The bytes are untrusted, and the parsers of numpy and Python raise no fixed set of exceptions (ValueError,
    SyntaxError, RecursionError, MemoryError, ...). An uncaught exception would end the run.
    """
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(f"{what} cannot be read: {type(error).__name__}: {reason}") from error
