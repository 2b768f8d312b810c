"""Flower's ``RecordDict`` to and from the wire's ``Records``, array data left out as references.

The only module of the wire that touches Flower; public API only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from gym_fed.errors import ErrorCode, GymError
from gym_fed.wire.limits import DELTA_STYPE
from gym_fed.wire.v1 import hub_pb2 as pb

PutObject = Callable[[bytes], None]
"""Keeps the bytes of an array under their sha256."""
GetObject = Callable[[pb.ArrayRef], bytes]
"""Gives the bytes that a reference names."""

MAX_RECORDS = 64
MAX_REFERENCES = 16_384
MAX_ENTRIES = 4_096
"""Entries of all metric and config records together."""
MAX_VALUES = 65_536
"""Values of all lists in them together: a list of Python objects takes many times its bytes on the wire."""

_FIELDS = {bool: "boolean", int: "integer", float: "number", str: "text", bytes: "blob"}
"""Field of ``Value`` for each type, with an ``s`` for a list of it; a bool is an int too, and so comes first."""


def reference(sha256: str, size_bytes: int) -> Array:
    """A Flower array that stands for a ``.gymdelta`` object: no data, the size as its shape."""
    return Array(dtype="uint8", shape=(size_bytes,), stype=DELTA_STYPE, data=b"")


def to_wire(records: RecordDict, put: PutObject) -> pb.Records:
    """Convert, handing every array's bytes to ``put``.

    An array of type ``gym.delta.v1`` without data is a reference already: its name is the object's sha256.
    """
    wire = pb.Records(order=list(records))
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            wire.arrays[name].arrays.extend(_array_to_wire(key, array, put) for key, array in record.items())
        elif isinstance(record, MetricRecord):
            wire.metrics[name].entries.extend(_entry(k, v) for k, v in record.items())
        else:
            wire.configs[name].entries.extend(_entry(k, v) for k, v in record.items())
    return wire


def from_wire(wire: pb.Records, get: GetObject) -> RecordDict:
    """Convert back; deltas stay references, other arrays get their bytes from ``get``.

    Raises:
        GymError: ``USAGE`` when the record names are inconsistent, ``TOO_LARGE`` for more of them than ``check_counts``
            allows.
    """
    check_counts(wire)
    names = {*wire.arrays, *wire.metrics, *wire.configs}
    if set(wire.order) != names or len(wire.order) != len(names):
        raise GymError(
            ErrorCode.USAGE, f"records {sorted(names)} do not match their order {list(wire.order)}"
        )
    records = RecordDict()
    for name in wire.order:
        if name in wire.arrays:
            refs = wire.arrays[name].arrays
            records[name] = ArrayRecord({ref.name: _array_from_wire(ref, get) for ref in refs})
        elif name in wire.metrics:
            records[name] = MetricRecord({e.key: _value(e.value) for e in wire.metrics[name].entries})
        else:
            records[name] = ConfigRecord({e.key: _value(e.value) for e in wire.configs[name].entries})
    return records


def check_counts(wire: pb.Records) -> None:
    """Bound what records take once they are Python objects, before the first of them is made.

    Raises:
        GymError: ``TOO_LARGE`` for more records, references, entries or values than the module's limits.
    """
    entries = [*_entries(wire)]
    counts = {
        "records": (len(wire.arrays) + len(wire.metrics) + len(wire.configs), MAX_RECORDS),
        "names in their order": (len(wire.order), MAX_RECORDS),
        "references": (sum(len(record.arrays) for record in wire.arrays.values()), MAX_REFERENCES),
        "entries": (len(entries), MAX_ENTRIES),
        "values": (sum(_length(entry.value) for entry in entries), MAX_VALUES),
    }
    for what, (found, most) in counts.items():
        if found > most:
            raise GymError(ErrorCode.TOO_LARGE, f"{found} {what} in one message; {most} are allowed")


def references(wire: pb.Records) -> list[pb.ArrayRef]:
    """Every object that the records name; a record that the order has twice counts once."""
    return [
        ref for name in dict.fromkeys(wire.order) if name in wire.arrays for ref in wire.arrays[name].arrays
    ]


def _entries(wire: pb.Records) -> Iterator[pb.Entry]:
    for records in (wire.metrics, wire.configs):
        for record in records.values():
            yield from record.entries


def _length(value: pb.Value) -> int:
    """How many objects a value becomes."""
    kind = value.WhichOneof("value")
    found: Any = None if kind is None else getattr(value, kind)
    return len(found.values) if hasattr(found, "values") else 1


def _array_to_wire(name: str, array: Array, put: PutObject) -> pb.ArrayRef:
    if array.stype == DELTA_STYPE and not array.data:
        sha256, size = name, array.shape[0]
    else:
        sha256, size = hashlib.sha256(array.data).hexdigest(), len(array.data)
        put(array.data)
    return pb.ArrayRef(
        name=name, dtype=array.dtype, shape=array.shape, stype=array.stype, sha256=sha256, size_bytes=size
    )


def _array_from_wire(ref: pb.ArrayRef, get: GetObject) -> Array:
    data = b"" if ref.stype == DELTA_STYPE else get(ref)
    return Array(dtype=ref.dtype, shape=tuple(ref.shape), stype=ref.stype, data=data)


def _entry(key: str, value: Any) -> pb.Entry:
    return pb.Entry(key=key, value=_to_value(value))


def _to_value(value: Any) -> pb.Value:
    is_list = isinstance(value, list)
    one = (value[0] if value else 0.0) if is_list else value
    field = next((name for kind, name in _FIELDS.items() if isinstance(one, kind)), None)
    if field is None:
        what = f"{'a list of ' if is_list else ''}{type(one).__name__}"
        raise TypeError(f"{what} is not a value of a Flower record")
    given: dict[str, Any] = {f"{field}s": {"values": value}} if is_list else {field: value}
    return pb.Value(**given)


def _value(value: pb.Value) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        raise GymError(ErrorCode.USAGE, "a record entry has no value")
    found = getattr(value, kind)
    return list(found.values) if hasattr(found, "values") else found
