"""Find data files by path, pattern or URL, and read raw rows from JSON, JSONL, CSV, Parquet, tar and text, with places.

Rows are read lazily; no row may be longer than ``bounded.MAX_ROW_BYTES``.
"""

from __future__ import annotations

import csv
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.bounded import (
    BOM,
    DELIMITER_BYTES,
    MAX_ROW_BYTES,
    CsvRow,
    JsonItems,
    bounded_lines,
    bounded_whole,
    buffered,
    decoded,
    delimiter_name,
    delimiter_of,
    json_line,
    not_utf8,
    too_long,
)
from gym_fed.data.rows import without_filled_nulls
from gym_fed.data.shards import read_shard

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
"""Suffixes of files whose rows can be read at random."""
_SHARD = ".tar"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


@dataclass(frozen=True)
class DataFile:
    """A file, local or remote through fsspec.

    Attributes:
        name: The file's name in messages: the path or URL.
        suffix: The suffix without ``.gz``.
        folder: The folder of a local file; None for a URL.
    """

    name: str
    suffix: str
    folder: Path | None
    _fs: Any
    _path: str

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file, decompressing ``.gz``."""
        compression = "gzip" if self._path.lower().endswith(".gz") else None
        with self._fs.open(self._path, "rb", compression=compression) as stream:
            yield stream

    def stamp(self) -> dict[str, Any]:
        """Return the name, size and version mark, which change with the bytes; the mark is empty for local files."""
        info = self._fs.info(self._path)
        marks = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated")
        return {"name": self.name, "size": info.get("size")} | {k: str(info[k]) for k in marks if k in info}


def find_files(path: str | Path) -> list[DataFile]:
    """List the files that ``path`` matches.

    Args:
        path: A file with any name; a folder, including the data files in its subfolders; a pattern with ``*``, ``?`` or
            ``[...]``; or any of these as an fsspec URL (``memory://``, ``s3://``, ...).

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is none; ``MISSING_DEPENDENCY`` or ``USAGE`` for a URL that cannot be
            opened.
    """
    fs, root, prefix = filesystem(path)
    if fs.isfile(root):
        paths = [root]
    elif fs.isdir(root):
        paths = [name for name in fs.find(root) if _is_data(name, root)]
    elif any(c in root for c in "*?["):
        hidden = PurePosixPath(root).name.startswith(".")  # as in a shell, * does not match a leading dot
        names = [name for name in fs.glob(root) if hidden or not PurePosixPath(name).name.startswith(".")]
        paths = [name for name in names if fs.isfile(name)]
    else:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no data file at {path}",
            "use the path of a data file or a folder of them",
        )
    if not paths:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no data files in {path}",
            f"data files end in {', '.join((*SUFFIXES, _SHARD))}, optionally followed by .gz",
        )
    return [_data_file(name, path, fs, prefix, alone=fs.isfile(root)) for name in sorted(paths)]


def filesystem(path: str | Path) -> tuple[Any, str, str]:
    """Return the fsspec filesystem of a path or URL, the path in it, and the prefix of paths in messages.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if the protocol's package is not installed; ``USAGE`` for an unknown protocol.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    text = str(path)
    if "://" not in text:
        return LocalFileSystem(), str(Path(text).expanduser()), ""
    protocol = text.partition("://")[0]
    if protocol == "s3" and (s3 := _s3(text)) is not None:
        return s3
    try:
        fs, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{path}: {protocol}:// needs a package that is not installed: {error}",
            "pip install 'gym-fed[s3]'" if protocol == "s3" else "install it, or copy the files here",
        ) from error
    except ValueError as error:
        raise GymError(
            ErrorCode.USAGE, f"{path}: {error}", "fsspec supports file://, memory://, s3:// and others"
        ) from error
    return fs, str(root), f"{protocol}://"


def _s3(url: str) -> tuple[Any, str, str] | None:
    """Return the S3 filesystem of obstore; None if it is not installed, so that another package can read the URL.

    Credentials, region and endpoint come from AWS's environment variables; ``AWS_ALLOW_HTTP`` allows plain HTTP.
    """
    try:
        from obstore.fsspec import FsspecStore
    except ImportError:
        return None
    store: Any = FsspecStore
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    fs = store("s3", client_options={"allow_http": allow_http}, skip_instance_cache=True)
    return fs, url.removeprefix("s3://").rstrip("/"), "s3://"


def _data_file(name: str, path: str | Path, fs: Any, prefix: str, *, alone: bool) -> DataFile:
    suffixes = [s.lower() for s in PurePosixPath(name).suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    local = prefix in ("", "file://")
    if prefix:
        shown = f"{prefix}{name.lstrip('/')}" if prefix != "file://" else name
    else:  # as the user wrote it, if that is the path of this file
        shown = str(Path(path)) if alone else _as_written(name)
    suffix = suffixes[-1] if suffixes else ""
    return DataFile(shown, suffix, Path(name).parent if local else None, fs, name)


def _as_written(name: str) -> str:
    """Return the path relative to the working directory, if it is below it."""
    absolute = Path(name)
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else name


def _is_data(name: str, root: str) -> bool:
    inside = PurePosixPath(name.removeprefix(root))
    if inside.name in _DESCRIPTIONS or any(part.startswith(".") for part in inside.parts):
        return False
    return inside.name.lower().removesuffix(".gz").endswith((*SUFFIXES, _SHARD))


Placed = tuple[str, Any]
_PEEKED_BYTES = 4096
_PARQUET_ROWS = 256
JSON_CELLS = (
    *("messages", "conversations", "history", "prompt", "completion", "chosen", "rejected"),
    *("images", "audios", "videos"),
)
_TEXT_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")


def read_raw(file: DataFile, *, text_lines: bool = False) -> Iterator[Placed]:
    """Yield rows in file order.

    Args:
        file: A file whose suffix determines its format; unknown suffixes are read as JSONL.
        text_lines: True to read each line of a ``.txt`` file as a row (as in LLaMA-Factory), instead of the file as one
            text.

    Raises:
        GymError: ``DATA_INVALID`` naming file and line, or the row if the format has no lines.
    """
    try:
        with file.open() as stream:
            if file.suffix == ".parquet":
                yield from _read_parquet(file.name, stream)
                return
            if file.suffix == _SHARD:
                yield from read_shard(file.name, stream)
                return
            reader = buffered(file.name, stream)
            if file.suffix == ".txt":
                yield from _read_text(file.name, reader, text_lines)
            elif file.suffix in (".csv", ".tsv"):
                yield from _read_csv(
                    file.name, reader, delimiter_of(file.suffix, reader.peek(DELIMITER_BYTES))
                )
            elif file.suffix == ".json" or _begins_a_list(reader):
                yield from _read_json(file.name, reader)
            else:
                yield from _read_jsonl(file.name, reader)
    except (EOFError, zlib.error, OSError) as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file.name} cannot be read: {error}",
            "restore the file, or remove it from the sources",
        ) from error


def delimiter_in(file: DataFile) -> str | None:
    """Return the delimiter of a CSV file; None for other formats."""
    if file.suffix not in (".csv", ".tsv"):
        return None
    with file.open() as stream:
        return delimiter_of(file.suffix, buffered(file.name, stream).peek(DELIMITER_BYTES))


def _read_text(name: str, reader: io.BufferedReader, lines: bool) -> Iterator[Placed]:
    if not lines:
        yield name, {"text": decoded(name, bounded_whole(name, reader))}
        return
    for place, line in _lines(name, reader):
        yield place, {"text": line.rstrip("\r\n")}


def _lines(name: str, reader: io.BufferedReader) -> Iterator[tuple[str, str]]:
    """Yield non-empty lines with ``file:line``."""
    start = 0
    for number, line in enumerate(bounded_lines(name, reader), start=1):
        text = decoded(name, line, start)
        start += len(line)
        if text.strip():
            yield f"{name}:{number}", text


def _begins_a_list(reader: io.BufferedReader) -> bool:
    """Return True if a ``.jsonl`` file is one JSON list. Its first lines may be empty."""
    return reader.peek(_PEEKED_BYTES).removeprefix(BOM).lstrip()[:1] == b"["


def _read_jsonl(name: str, reader: io.BufferedReader) -> Iterator[Placed]:
    for place, line in _lines(name, reader):
        yield place, json_line(place, line)


def _read_json(name: str, reader: io.BufferedReader) -> Iterator[Placed]:
    """Yield the items of a JSON list, each with its line."""
    try:
        for number, (line, value) in enumerate(JsonItems(name, reader), start=1):
            yield f"{name}:{line}: row {number}", value
    except json.JSONDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}",
            "a .json file is one list of rows; rename the file to .jsonl if it has one row per line",
        ) from error
    except RecursionError as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{name}: nested too deeply", "flatten the rows") from error
    except ValueError as error:  # such as a number of 5,000 digits
        raise GymError(ErrorCode.DATA_INVALID, f"{name}: {error}", "write it in quotes") from error


def after_space(text: str, at: int) -> int:
    """Return the offset of the next character of a JSON text that is not whitespace."""
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _read_csv(name: str, stream: io.BufferedReader, delimiter: str) -> Iterator[Placed]:
    """Yield rows under a header line; empty cells are omitted, and cells of list columns are parsed as JSON."""
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    row_bytes = 0

    def lines() -> Iterator[str]:
        nonlocal row_bytes
        while line := text.readline(MAX_ROW_BYTES + 1):
            row_bytes += len(line)
            if row_bytes > MAX_ROW_BYTES:
                raise too_long(
                    f"{name}:{max(reader.line_num + 1, 2)}: the row", "close the quotes, or drop the row"
                )
            yield line

    reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
    while True:
        row_bytes = 0
        line = max(reader.line_num + 1, 2)  # the header is read with the first row
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise GymError(
                ErrorCode.DATA_INVALID, f"{name}:{line}: not valid CSV: {error}", "quote the cell"
            ) from error
        except UnicodeDecodeError as error:
            raise not_utf8(f"{name}: not UTF-8 near line {line}") from error
        if row is None:
            return
        place = f"{name}:{max(line, 2)}"
        if None in row or None in row.values():
            more_or_fewer = "more" if None in row else "fewer"
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: {more_or_fewer} cells than the header has",
                f"quote cells that contain {delimiter_name(delimiter)}",
            )
        cells = {key: cell_value(key, value) for key, value in row.items() if value != ""}
        yield place, CsvRow(cells, tuple(row))


def cell_value(key: str, value: str) -> Any:
    """Parse a CSV cell: lists and messages are JSON, everything else is text."""
    if key in ("label", "kto_tag", "forget") and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if key in JSON_CELLS and value.lstrip()[:1] in ("[", "{"):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value  # a text that starts with a bracket; the format decides whether text is allowed
        return parsed if key not in _TEXT_OR_MESSAGES or _is_messages(parsed) else value
    return value


def _is_messages(value: Any) -> bool:
    """Return True if JSON in a cell is a conversation instead of text that happens to be JSON."""
    turns = value if isinstance(value, list) else [value]
    return bool(turns) and all(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns
    )


def _read_parquet(name: str, stream: BinaryIO) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        opened = parquet.ParquetFile(stream)
        for index in range(opened.num_row_groups):
            group = opened.metadata.row_group(index)
            # The average row exceeds the limit, so the file is refused before it is decompressed.
            if group.total_byte_size > MAX_ROW_BYTES * max(1, group.num_rows):
                raise too_long(
                    f"{name}: one of the rows {number + 1} to {number + group.num_rows}", "drop the row"
                )
            for batch in opened.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[index]):
                at_once = batch.num_rows if batch.nbytes <= MAX_ROW_BYTES else 1
                for at in range(0, batch.num_rows, at_once):
                    part = batch.slice(at, at_once)
                    if part.nbytes > MAX_ROW_BYTES:
                        raise too_long(f"{name}: row {number + 1}", "drop the row")
                    for row in part.to_pylist(maps_as_pydicts="strict"):
                        number += 1
                        yield f"{name}: row {number}", without_filled_nulls(row)
    except (pyarrow.ArrowException, UnicodeDecodeError, KeyError) as error:  # KeyError: a map has a key twice
        raise GymError(
            ErrorCode.DATA_INVALID, f"{name}: not a readable Parquet file: {error}", "rewrite the file"
        ) from error
