"""Convert Flower's ``RecordDict`` to and from the wire's ``Records``, in which arrays are references to their data.

This is the only wire module that uses Flower, and it uses only Flower's public API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.references import check_counts
from gym_fed.trust.wire.v1 import hub_pb2 as pb

PutObject = Callable[[bytes], None]
"""Stores the bytes of an array under their SHA-256."""
GetObject = Callable[[pb.ArrayRef], bytes]
"""Returns the bytes of a reference."""

_FIELDS = {bool: "boolean", int: "integer", float: "number", str: "text", bytes: "blob"}
"""Field of ``Value`` for each type, with suffix ``s`` for lists. ``bool`` comes before its base class ``int``."""


def reference(sha256: str, size_bytes: int) -> Array:
    """Return a Flower array that refers to a ``.gymdelta`` object: it has no data, and its shape is the size."""
    return Array(dtype="uint8", shape=(size_bytes,), stype=DELTA_STYPE, data=b"")


def to_wire(records: RecordDict, put: PutObject) -> pb.Records:
    """Convert records to the wire format, passing the bytes of every array to ``put``.

    An array of type ``gym.delta.v1`` without data is already a reference, named by the object's SHA-256.
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
    """Convert records from the wire format. Deltas remain references; the bytes of other arrays come from ``get``.

    Raises:
        GymError: ``USAGE`` if the record names are inconsistent; ``TOO_LARGE`` above the limits of ``check_counts``.
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
    sample = (value[0] if value else 0.0) if is_list else value
    field = next((name for kind, name in _FIELDS.items() if isinstance(sample, kind)), None)
    if field is None:
        shape = f"{'a list of ' if is_list else ''}{type(sample).__name__}"
        raise TypeError(f"{shape} cannot be stored in a Flower record")
    given: dict[str, Any] = {f"{field}s": {"values": value}} if is_list else {field: value}
    return pb.Value(**given)


def _value(value: pb.Value) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        raise GymError(ErrorCode.USAGE, "a record entry has no value")
    content = getattr(value, kind)
    return list(content.values) if hasattr(content, "values") else content
