"""Resolve a file, folder, pattern or URL to a sorted list of data files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


@dataclass(frozen=True)
class DataFile:
    """One file, local or remote through fsspec.

    Attributes:
        name: How messages call it: the path, or the URL.
        suffix: Of ``SUFFIXES`` or another, without ``.gz``.
        folder: Where a local file lies; None behind a URL.
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
        """Name, size and the store's version mark, which change with the bytes (empty for local files)."""
        info = self._fs.info(self._path)
        marks = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated")
        return {"name": self.name, "size": info.get("size")} | {k: str(info[k]) for k in marks if k in info}


def find_files(path: str | Path) -> list[DataFile]:
    """List the files that ``path`` stands for.

    Args:
        path: A file of any name; a folder, all of whose data files are meant, those in folders below too; a pattern
            with ``*``, ``?`` or ``[...]``; or any of these as an fsspec URL (``memory://``, ``s3://``, ...).

    Raises:
        GymError: ``FILE_NOT_FOUND`` when there is none; ``MISSING_DEPENDENCY`` or ``USAGE`` for a URL that cannot be
            opened here.
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
            "give the path of a data file or a folder of them",
        )
    if not paths:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no data files in {path}",
            f"data files end in {', '.join(SUFFIXES)}, or in .gz after that",
        )
    return [_data_file(name, path, fs, prefix, alone=fs.isfile(root)) for name in sorted(paths)]


def filesystem(path: str | Path) -> tuple[Any, str, str]:
    """Return the fsspec filesystem of a path or URL, the path in it, and the prefix of paths in messages.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` when the protocol's package is absent, ``USAGE`` for an unknown protocol.
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
            ErrorCode.USAGE, f"{path}: {error}", "fsspec knows file://, memory://, s3:// and others"
        ) from error
    return fs, str(root), f"{protocol}://"


def _s3(url: str) -> tuple[Any, str, str] | None:
    """S3 by obstore; None if it is not installed, so that another package may read the URL.

    Credentials, region and endpoint come from AWS's environment variables; ``AWS_ALLOW_HTTP`` allows plain HTTP.
    """
    import os

    try:
        from obstore.fsspec import FsspecStore
    except ImportError:
        return None
    make: Any = FsspecStore
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    fs = make("s3", client_options={"allow_http": plain}, skip_instance_cache=True)
    return fs, url.removeprefix("s3://").rstrip("/"), "s3://"


def _data_file(name: str, path: str | Path, fs: Any, prefix: str, *, alone: bool) -> DataFile:
    suffixes = [s.lower() for s in PurePosixPath(name).suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    local = prefix in ("", "file://")
    if prefix:
        shown = f"{prefix}{name.lstrip('/')}" if prefix != "file://" else name
    else:  # as it was written, where that names this very file
        shown = str(Path(path)) if alone else _as_written(name)
    suffix = suffixes[-1] if suffixes else ""
    return DataFile(shown, suffix, Path(name).parent if local else None, fs, name)


def _as_written(name: str) -> str:
    """The path relative to the working directory, if it is below it."""
    absolute = Path(name)
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else name


def _is_data(name: str, root: str) -> bool:
    inside = PurePosixPath(name.removeprefix(root))
    if inside.name in _DESCRIPTIONS or any(part.startswith(".") for part in inside.parts):
        return False
    return inside.name.lower().removesuffix(".gz").endswith(SUFFIXES)
