"""Store encoded rows in Arrow tables, memory-mapped or in memory, in the form that ``datasets`` and TRL read.

A column of ids has the type ``list<int32>``: a buffer with the ids of a batch, and the offset of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gym_fed.data.arrow_rows import IndexedRows, buffer_of, spooled
from gym_fed.data.row_counts import IGNORED, RowCounts

_BATCH_ROWS = 1000
_TYPES = {list: pa.list_(pa.int32()), bool: pa.bool_(), int: pa.int64()}
_NO_IDS = ("seq_lengths", "position_ids")


class EncodedTable(IndexedRows):
    """Encoded rows with the counts of their sources.

    Args:
        source: An Arrow stream of ``write_encoded``: a file, or a buffer.
        counts: Counts of the rows that they were encoded from.
        largest: Largest value of each column of ids.
    """

    def __init__(self, source: Path | pa.Buffer, counts: RowCounts, largest: Mapping[str, int]) -> None:
        from datasets import Dataset
        from datasets.table import InMemoryTable, MemoryMappedTable

        self.counts, self.largest, self._source = counts, largest, source
        if isinstance(source, Path):
            table = MemoryMappedTable.from_file(str(source))
            self.dataset = Dataset(table, fingerprint=source.stem)
        else:
            self.dataset = Dataset(InMemoryTable.from_buffer(source), fingerprint="encoded")

    def __len__(self) -> int:
        return len(self.dataset)

    def row_at(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.dataset[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows in order. A file is read instead of mapped, so that its pages do not count as used memory."""
        for batch in read_batches(self._source):
            yield from batch.to_pylist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def as_dataset(self, num_embeddings: int) -> Any:
        """Return the rows as a ``datasets.Dataset``."""
        return self.dataset

    def sizes(self) -> NDArray[np.int64]:
        """Return ``[rows]``: number of ids in all columns of each row."""
        total = np.zeros(len(self), np.int64)
        for column in self.dataset.data.columns:
            if pa.types.is_list(column.type):
                total += pc.list_value_length(column).to_numpy()
        return total


def collect_encoded(rows: Iterable[dict[str, Any]], counts: RowCounts) -> EncodedTable:
    """Store encoded rows in an unnamed temporary file, in memory while it is small. ``counts`` may be filled by
    ``rows``."""
    largest: dict[str, int] = {}
    with spooled() as sink:
        for _ in write_encoded(rows, sink, largest):
            pass
        return EncodedTable(buffer_of(sink), counts, largest)


def write_encoded(rows: Iterable[dict[str, Any]], sink: IO[bytes], largest: dict[str, int]) -> Iterator[int]:
    """Write an Arrow stream of encoded rows, which all have the same keys; yield the number of rows of each batch.

    Args:
        rows: Values are lists of ids, integers or booleans.
        largest: Updated with the largest value of each column of ids.
    """
    source = iter(rows)
    chunk = list(islice(source, _BATCH_ROWS))
    schema = _schema(chunk[0]) if chunk else pa.schema([])
    with pa.ipc.new_stream(sink, schema) as writer:
        while chunk:
            batch = pa.RecordBatch.from_pylist(chunk, schema=schema)
            writer.write_batch(batch)
            _note_largest(batch, largest)
            yield len(chunk)
            chunk = list(islice(source, _BATCH_ROWS))


def read_batches(source: Path | pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow stream, one in memory at a time."""
    opened = pa.BufferReader(source) if isinstance(source, pa.Buffer) else pa.OSFile(str(source))
    with opened, pa.ipc.open_stream(opened) as reader:
        yield from reader


def is_encoded(file: Path) -> bool:
    """Return True if ``write_encoded`` wrote the file, False if ``arrow_rows.write_rows`` did."""
    with pa.OSFile(str(file)) as opened, pa.ipc.open_stream(opened) as reader:
        return "row" not in reader.schema.names


def largest_ids(file: Path) -> dict[str, int]:
    """Return the largest value of each column of ids.

    Raises:
        ValueError: For columns of a different type, negative ids, and labels that do not fit their row's ids.
    """
    largest: dict[str, int] = {}
    for batch in read_batches(file):
        if not set(batch.schema.types) <= set(_TYPES.values()):
            raise ValueError("it has unknown columns")
        batch.validate(full=True)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count:
                raise ValueError(f"{name} has rows without a value")
            if pa.types.is_list(column.type):
                least = pc.min(column.flatten()).as_py()
                if least is not None and least < 0 and (least != IGNORED or not name.endswith("labels")):
                    raise ValueError(f"{name} contains {least}, which is not a token")
        if {"labels", "input_ids"} <= set(batch.schema.names) and not pc.list_value_length(
            batch.column("labels")
        ).equals(pc.list_value_length(batch.column("input_ids"))):
            raise ValueError("a row has different numbers of labels and input_ids")
        _note_largest(batch, largest)
    return largest


def _note_largest(batch: pa.RecordBatch, largest: dict[str, int]) -> None:
    """Update the largest value of each column of ids."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in _NO_IDS or not pa.types.is_list(column.type):
            continue
        if (value := pc.max(column.flatten()).as_py()) is not None:
            largest[name] = max(largest.get(name, 0), value)


def _schema(row: Mapping[str, Any]) -> pa.Schema:
    return pa.schema([(key, _TYPES[type(value)]) for key, value in row.items()])
