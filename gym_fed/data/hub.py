"""Read datasets of the Hugging Face Hub from the local cache or by streaming; a dataset's code is never run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.data.files import Placed
from gym_fed.data.rows import without_filled_nulls

_IN_ARCHIVE = re.compile(r"(bz2|gzip|lz4|tar|xz|zip|zstd)://", re.ASCII)
"""Prefix that ``datasets`` uses for a file in an archive, such as ``zip://rows.csv::``, before the archive's
location."""


def hub_rows(
    name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    folder: str | None = None,
    files: Sequence[str] = (),
) -> Iterator[Placed]:
    """Yield the raw rows of a Hub dataset, streamed at the commit that the user agreed to if it is not cached.

    Args:
        name: ``owner/name``.
        subset: Name of the dataset's configuration.
        split: Name of the split; ``train`` by default.
        folder: Folder of the repository; only its files are read.
        files: Names of the only files to read, as the split.

    Raises:
        GymError: ``UNAVAILABLE`` if it is not in the cache and the Hub cannot be reached; ``NOT_FOUND`` if there is no
            such dataset, subset or split; ``DATA_INVALID`` if its card refers to files outside the repository;
            ``TOO_LARGE`` if the Hub sends more bytes than the size of a file.
    """
    import datasets

    from gym_fed.base.downloads.hub import cached_dataset, hub_errors
    from gym_fed.base.downloads.streamed import to_stream

    split = split or "train"
    source = cached_dataset(name)
    commit = to_stream(name).commit if source is None else None
    where = f"{name} ({subset}, {split})" if subset else f"{name} ({split})"
    remedy = f"fetch it once with: hf download --repo-type dataset {name}; or use files with path"
    try:
        with hub_errors("dataset", name):
            with _plain_requests():
                builder = datasets.load_dataset_builder(
                    source or name,
                    name=subset,
                    data_dir=folder,
                    data_files={split: list(files)} if files else None,
                    revision=commit,
                )
            _require_own_files(name, source, builder.config.data_files)
            stream: Any = builder.as_streaming_dataset(split=split)
            features = stream.features or {}
            if features:  # a JSON list has no features before it is read, and needs no decoding
                stream = stream.decode(False)
            for number, row in enumerate(stream, 1):
                yield f"{where}: row {number}", without_filled_nulls(row, features, json_is_text=True)
    except ConnectionError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"hub dataset {name!r} is not on this machine, and the hub cannot be reached: {_line(error)}",
            remedy,
        ) from error
    except RecursionError as error:
        raise GymError(ErrorCode.DATA_INVALID, f"hub dataset {where}: nested too deeply", remedy) from error
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise GymError(ErrorCode.NOT_FOUND, f"hub dataset {where}: {_line(error)}", remedy) from error


@contextmanager
def _plain_requests() -> Iterator[None]:
    """Download small files with the client whose responses are bounded, not with hf_xet."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def _require_own_files(name: str, source: str | None, data_files: Any) -> None:
    """Refuse a dataset whose card refers to local files, another dataset or another host.

    Raises:
        GymError: ``DATA_INVALID``.
    """
    inside = f"{os.path.realpath(source)}{os.sep}" if source else f"hf://datasets/{name}".lower()
    for paths in (data_files or {}).values():
        for path in map(str, paths):
            *archives, last = path.split("::")
            place = os.path.normpath(last) if source else last.lower()
            is_own = place.startswith(inside) and (bool(source) or place[len(inside) :][:1] in ("@", "/"))
            if not (is_own and ".." not in last.split("/") and all(map(_IN_ARCHIVE.match, archives))):
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"hub dataset {name!r}: its card lists {plain(path, 200)!r}, which is not one of its files",
                    "choose another dataset, or use files with path",
                )


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
