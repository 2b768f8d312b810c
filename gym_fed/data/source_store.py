"""Store the rows of a source in Arrow: large local files are read once and memory-mapped by later runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.arrow_cache import ArrowCache, recipe_digest
from gym_fed.data.arrow_rows import MAX_MEMORY_BYTES, ArrowRows, collect_rows, write_rows
from gym_fed.data.files import find_files
from gym_fed.data.inputs import as_input
from gym_fed.data.rows import Row, RowKind, iter_kind
from gym_fed.data.sources import source_rows


def is_large(source: DataConfig) -> bool:
    """Return True if the source consists of local files that are large enough to cache."""
    if source.path is None:
        return False
    files = find_files(source.path)
    sizes = [file.stamp()["size"] for file in files if file.folder is not None]
    return len(sizes) == len(files) and sum(sizes) > MAX_MEMORY_BYTES


def source_digest(source: DataConfig, kind: RowKind) -> str:
    """Return the digest of a large source for its ``ArrowCache``; this reads its files.

    Args:
        source: The source, whose weight and role are ignored.
        kind: Kind to which every row can be converted; see ``gym_fed.data.rows``.
    """
    plain = source.model_copy(update={"weight": 1.0, "role": "learn"})
    return recipe_digest({"rows": as_input(plain).key(), "kind": kind, "folder": str(Path.cwd())})


def fill_source(cache: ArrowCache, source: DataConfig, kind: RowKind) -> Iterator[int]:
    """Write the rows of a source into its cache; yield the number of rows of each batch.

    Raises:
        GymError: Errors of ``source_rows`` and ``as_kind``; ``DATA_INVALID`` if a file changes while it is read.
    """
    rows = convertible((row for _, row in source_rows(source)), kind)
    yield from cache.fill(lambda sink: write_rows(rows, sink), dict, lambda: source_digest(source, kind))
    if not cache.is_filled():
        reason = f"{source.path} changed while it was being read"
        raise GymError(ErrorCode.DATA_INVALID, reason, "run the command again when the file is complete")


def stored_rows(source: DataConfig, kind: RowKind = "any") -> ArrowRows:
    """Return the rows of a source, from the cache if it is large.

    Raises:
        GymError: See ``source_rows`` and ``as_kind``.
    """
    if not is_large(source):
        return collect_rows(convertible((row for _, row in source_rows(source)), kind))
    cache = ArrowCache(source_digest(source, kind))
    if not cache.is_intact():
        for _ in fill_source(cache, source, kind):
            pass
    return ArrowRows(cache.path)


def convertible(rows: Iterable[Row], kind: RowKind) -> Iterator[Row]:
    """Yield rows unchanged, and check that each can be converted to ``kind``.

    Raises:
        GymError: ``DATA_INVALID`` for a row that cannot be converted to ``kind``.
    """
    current: list[Row] = []

    def remembered() -> Iterator[Row]:
        for row in rows:
            current[:] = [row]
            yield row

    for _ in iter_kind(remembered(), kind):
        if current:  # a pair may become two rows
            yield current.pop()
