"""Count and list the objects in the wire's ``Records``, without Flower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb

MAX_RECORDS = 64
MAX_REFERENCES = 16_384
MAX_ENTRIES = 4_096
"""Maximum number of entries in all metric and config records together."""
MAX_VALUES = 65_536
"""Maximum number of list values in these records together, since Python objects take much more memory than bytes on the
wire."""


def check_counts(wire: pb.Records) -> None:
    """Check the size of records before any of them becomes a Python object, to limit memory.

    Raises:
        GymError: ``TOO_LARGE`` if the records, references, entries or values exceed the module's limits.
    """
    entries = [*_entries(wire)]
    counts = {
        "records": (len(wire.arrays) + len(wire.metrics) + len(wire.configs), MAX_RECORDS),
        "names in their order": (len(wire.order), MAX_RECORDS),
        "references": (sum(len(record.arrays) for record in wire.arrays.values()), MAX_REFERENCES),
        "entries": (len(entries), MAX_ENTRIES),
        "values": (sum(_length(entry.value) for entry in entries), MAX_VALUES),
    }
    for noun, (count, most) in counts.items():
        if count > most:
            raise GymError(ErrorCode.TOO_LARGE, f"{count} {noun} in one message; at most {most} are allowed")


def references(wire: pb.Records) -> list[pb.ArrayRef]:
    """List all objects that the records refer to; repeated records count once."""
    return [
        ref for name in dict.fromkeys(wire.order) if name in wire.arrays for ref in wire.arrays[name].arrays
    ]


def _entries(wire: pb.Records) -> Iterator[pb.Entry]:
    for records in (wire.metrics, wire.configs):
        for record in records.values():
            yield from record.entries


def _length(value: pb.Value) -> int:
    """Return the number of Python objects that represent a value."""
    kind = value.WhichOneof("value")
    content: Any = None if kind is None else getattr(value, kind)
    return len(content.values) if hasattr(content, "values") else 1
