"""Store rows in Arrow tables, which are memory-mapped from a file, or from a temporary file if they are large.

A row is stored as JSON text, because Arrow's typed columns would give all rows the same keys. Its bytes (images, audio)
are in a separate column.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.rows import PlacedDict, Row

MAX_MEMORY_BYTES = 8 << 20
"""Maximum size of tables that stay in memory, and of data files that are not cached."""

_BATCH_ROWS = 1000
_BATCH_BYTES = 16 << 20
_TAG = "\0arrow"
"""Key of an object that represents a value that JSON cannot represent."""
_TAG_JSON = b'"\\u0000arrow":'
_SCHEMA = pa.schema(
    [
        ("row", pa.large_binary()),
        ("blobs", pa.list_(pa.large_binary())),
        ("place", pa.string()),
        ("origin", pa.string()),  # JSON of the keys that were not read, and of renamed columns
        ("digest", pa.binary(16)),
    ]
)


class IndexedRows(Sequence[Row]):
    """A sequence of rows that are read one at a time by index."""

    @abstractmethod
    def row_at(self, index: int) -> Row:
        """Return the row with an index from 0."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row_at(i) for i in range(*index.indices(len(self)))]
        return self.row_at(range(len(self))[index])


class ArrowRows(IndexedRows):
    """The rows of an Arrow stream. Only accessed rows are read.

    Args:
        source: The stream: a file, or a buffer.

    Attributes:
        digest: SHA-256 of all rows, hexadecimal.
    """

    def __init__(self, source: Path | pa.Buffer) -> None:
        self._source = source
        with pa.ipc.open_stream(_opened(source, mapped=True)) as reader:
            self._batches: list[pa.RecordBatch] = list(reader)
        self._ends = np.cumsum([len(batch) for batch in self._batches], dtype=np.int64)
        self._content: NDArray[np.bytes_] | None = None
        self.digest = hashlib.sha256(self.content_digests().tobytes()).hexdigest()

    @property
    def is_mapped(self) -> bool:
        """True if the rows are in a file that other processes can map."""
        return isinstance(self._source, Path)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row_at(self, index: int) -> Row:
        batch, at = _located(self._ends, index)
        return _decoded(self._batches[batch].slice(at, 1))[0]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. A file is read instead of mapped, so that its pages do not count as used memory."""
        with pa.ipc.open_stream(_opened(self._source, mapped=False)) as reader:
            for batch in reader:
                yield from _decoded(batch)

    def sizes(self) -> NDArray[np.int64]:
        """Return ``[rows]``: bytes of each row's JSON."""
        sizes = [pc.binary_length(batch.column("row")).to_numpy() for batch in self._batches]
        return np.concatenate(sizes) if sizes else np.zeros(0, np.int64)

    def content_digests(self) -> NDArray[np.bytes_]:
        """Return ``[rows]``: 16-byte digests that are equal for equal rows, regardless of the order of their keys."""
        if self._content is None:
            parts = [np.frombuffer(_fixed(batch), dtype="V16") for batch in self._batches]
            self._content = np.concatenate(parts) if parts else np.zeros(0, "V16")
        return self._content


def collect_rows(rows: Iterable[Row]) -> ArrowRows:
    """Store rows in an unnamed temporary file, in memory up to ``MAX_MEMORY_BYTES``.

    Raises:
        GymError: ``DATA_INVALID`` naming a row with a value that cannot be stored.
    """
    with spooled() as sink:
        for _ in write_rows(rows, sink):
            pass
        return ArrowRows(buffer_of(sink))


def spooled() -> IO[bytes]:
    """Open a temporary file for ``buffer_of``, in memory up to ``MAX_MEMORY_BYTES``."""
    return tempfile.SpooledTemporaryFile(max_size=MAX_MEMORY_BYTES)


def buffer_of(sink: Any) -> pa.Buffer:
    """Return the contents of a file from ``spooled``: its memory, or a mapping that outlives the file object."""
    sink.flush()
    if not sink._rolled:
        return pa.py_buffer(sink._file.getvalue())
    return pa.py_buffer(mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ))


def write_rows(rows: Iterable[Row], sink: IO[bytes]) -> Iterator[int]:
    """Write an Arrow stream of rows; yield the number of rows of each batch.

    Raises:
        GymError: ``DATA_INVALID`` naming a row with a value that cannot be stored.
    """
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        cells: list[tuple[Any, ...]] = []
        num_bytes = 0
        for number, row in enumerate(rows, 1):
            cells.append(_encoded(row, number))
            num_bytes += len(cells[-1][0]) + sum(map(len, cells[-1][1] or ()))
            if len(cells) == _BATCH_ROWS or num_bytes > _BATCH_BYTES:
                writer.write_batch(_batch(cells))
                yield len(cells)
                cells, num_bytes = [], 0
        if cells:
            writer.write_batch(_batch(cells))
            yield len(cells)


class SelectedRows(IndexedRows):
    """Rows of several stores by index, such as those of weighted sources or one side of a split.

    Args:
        parts: Stores, each with the indices of its rows, ``[n]`` int64, and True if the rows are marked ``forget``.
    """

    def __init__(self, parts: Sequence[tuple[ArrowRows, NDArray[np.int64], bool]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(indices) for _, indices, _ in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row_at(self, index: int) -> Row:
        part, at = _located(self._ends, index)
        store, indices, forgotten = self._parts[part]
        row = store[int(indices[at])]
        return _forgotten(row) if forgotten else row

    def __iter__(self) -> Iterator[Row]:
        for store, indices, forgotten in self._parts:
            for row in _in_order(store, indices):
                yield _forgotten(row) if forgotten else row

    @classmethod
    def whole(cls, store: ArrowRows) -> SelectedRows:
        """Return all rows of a store."""
        return cls([(store, np.arange(len(store)), False)])

    @property
    def is_mapped(self) -> bool:
        """True if all rows are in files that other processes can map."""
        return all(store.is_mapped for store, _, _ in self._parts)

    @property
    def digest(self) -> str:
        """SHA-256 of the rows in their order, hexadecimal."""
        parts = [
            [store.digest, hashlib.sha256(indices.tobytes()).hexdigest(), forgotten]
            for store, indices, forgotten in self._parts
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def sizes(self) -> NDArray[np.int64]:
        """Return ``[rows]``: bytes of each row's JSON."""
        return np.concatenate([store.sizes()[indices] for store, indices, _ in self._parts])

    def content_digests(self) -> NDArray[np.bytes_]:
        """Return ``[rows]``: digests that are equal for equal rows."""
        parts = []
        for store, indices, forgotten in self._parts:
            own = store.content_digests()[indices]
            mark = np.full((len(own), 1), forgotten, np.uint8)
            marked = np.concatenate([own.view(np.uint8).reshape(-1, 16), mark], axis=1)
            parts.append(np.ascontiguousarray(marked).view("V17").reshape(-1))
        return np.concatenate(parts)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> SelectedRows:
        """Return the rows at ascending indices."""
        chosen = np.asarray(indices, np.int64)
        parts, start = [], 0
        for (store, of_part, forgotten), end in zip(self._parts, self._ends.tolist(), strict=True):
            here = chosen[(chosen >= start) & (chosen < end)] - start
            parts.append((store, of_part[here], forgotten))
            start = end
        return SelectedRows(parts)


def _in_order(store: ArrowRows, indices: NDArray[np.int64]) -> Iterator[Row]:
    """Yield rows by index; ascending indices are read sequentially."""
    if len(indices) > 1 and not bool((np.diff(indices) > 0).all()):
        yield from (store[index] for index in indices.tolist())
        return
    remaining = iter(indices.tolist())
    following = next(remaining, None)
    for index, row in enumerate(store) if following is not None else ():
        if index == following:
            yield row
            if (following := next(remaining, None)) is None:
                return


def _forgotten(row: Row) -> Row:
    return PlacedDict.like({**row, "forget": True}, row)


def _opened(source: Path | pa.Buffer, *, mapped: bool) -> Any:
    if isinstance(source, pa.Buffer):
        return pa.BufferReader(source)
    return pa.memory_map(str(source)) if mapped else pa.OSFile(str(source))


def _fixed(batch: pa.RecordBatch) -> memoryview:
    """Return the bytes of a batch's digests."""
    column = batch.column("digest")
    return memoryview(column.buffers()[1])[column.offset * 16 : (column.offset + len(column)) * 16]


def _batch(cells: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*cells, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _encoded(row: Row, number: int) -> tuple[Any, ...]:
    """Return the cells of a row; the blobs are None if the row is JSON."""
    blobs: list[bytes] = []
    tags = 0

    def substitute(value: Any) -> Any:
        nonlocal tags
        tags += 1
        if isinstance(value, bytes | bytearray):
            blobs.append(bytes(value))
            return {_TAG: ["bytes", len(blobs) - 1]}
        if isinstance(value, datetime | date | time):
            return {_TAG: [type(value).__name__, value.isoformat()]}
        if isinstance(value, timedelta):
            return {_TAG: ["timedelta", [value.days, value.seconds, value.microseconds]]}
        if isinstance(value, Decimal):
            return {_TAG: ["Decimal", str(value)]}
        raise TypeError(f"a row has a value of type {type(value).__name__}, which data files cannot store")

    try:
        text = json.dumps(row, ensure_ascii=False, default=substitute).encode()
        if text.count(_TAG_JSON) != tags:
            raise ValueError(f"the key {_TAG!r} is reserved")
    except (TypeError, ValueError) as error:
        place = getattr(row, "place", None) or f"row {number}"
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place} cannot be stored: {error}",
            "use strings, numbers, booleans, bytes, dates, lists and objects",
        ) from error
    content = _content(row, text, blobs)
    return text, blobs if tags else None, getattr(row, "place", None), _origin(row), content


def _content(row: Row, text: bytes, blobs: list[bytes]) -> bytes:
    if len(row) > 1 or not isinstance(next(iter(row.values()), None), str):
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=repr).encode()
    return hashlib.blake2b(b"\0".join([text, *blobs]), digest_size=16).digest()


def _origin(row: Row) -> str | None:
    unread, columns = getattr(row, "unread", ()), getattr(row, "columns", None)
    return json.dumps([unread, dict(columns or {})]) if unread or columns else None


def _located(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return the part that contains a row and the row's index in it, given the cumulative sizes of the parts."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def _decoded(batch: pa.RecordBatch) -> list[Row]:
    rows = []
    cells = batch.drop_columns(["digest"]).to_pydict()
    for text, blobs, place, origin in zip(*cells.values(), strict=True):
        row = json.loads(text)
        if blobs is not None:
            row = _restored(row, blobs)
        unread, columns = json.loads(origin) if origin else ((), None)
        plain = place is None and origin is None
        rows.append(row if plain else PlacedDict.of(row, place, unread, columns))
    return rows


_RESTORE: Mapping[str, Any] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "Decimal": Decimal,
}


def _restored(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TAG}:
            kind, content = value[_TAG]
            return blobs[content] if kind == "bytes" else _RESTORE[kind](content)
        return {key: _restored(item, blobs) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item, blobs) for item in value]
    return value
