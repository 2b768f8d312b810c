"""Brings the files of a base from its hub into the home: resumed, bounded, each checked by sha256."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gym_client.hub.transfers import ObjectCache, Progress, download
from gym_client.hub.transport import HubClient
from gym_fed.base.files import BaseFile, check_settings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256, fsync_folder
from gym_fed.core.text import readable_bytes

T = TypeVar("T")

SPARE_BYTES = 256 << 20
"""What stays free on the disk."""


def fetch_files(
    client: HubClient,
    folder: Path,
    files: Sequence[BaseFile],
    retry: Callable[[Callable[[], Path]], Path],
    progress: Progress,
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> None:
    """Bring the files that ``folder`` lacks, one after the other; call it again to go on after a stop.

    Args:
        client: The hub, where the caller has an account.
        folder: Of this base alone: what is not in the listing is deleted.
        files: The listing, checked.
        retry: Repeats a download while the hub is away.
        progress: Bytes here, bytes in all.
        should_stop: True ends it where it is.
        count: Called with the bytes of each chunk that came.

    Raises:
        GymError: ``DISK_FULL`` before a byte is fetched, ``HASH_MISMATCH``, ``TOO_LARGE``, ``INTERRUPTED``,
            ``MODEL_INVALID`` for JSON that leads to code or to other files.
    """
    missing = [file for file in files if not _is_here(folder, file)]
    _delete_strangers(folder, files, missing)
    total = sum(file.size_bytes for file in files)
    done = total - sum(file.size_bytes for file in missing)
    _require_space(folder, missing)
    cache = ObjectCache(folder)
    progress(done, total)
    for file in missing:

        def bring(file: BaseFile = file, before: int = done) -> Path:
            def on_chunk(come: int, _: int) -> None:
                progress(before + come, total)
                failpoint("client-base-chunk")

            return download(client, cache, file.sha256, file.size_bytes, on_chunk, should_stop, count)

        os.replace(retry(bring), folder / file.name)
        done += file.size_bytes
    fsync_folder(folder)
    check_settings(folder, [file.name for file in files])


def _is_here(folder: Path, file: BaseFile) -> bool:
    path = folder / file.name
    if not path.is_file() or path.is_symlink() or path.stat().st_size != file.size_bytes:
        return False
    return file_sha256(path) == file.sha256


def _delete_strangers(folder: Path, files: Sequence[BaseFile], missing: Sequence[BaseFile]) -> None:
    """Delete what belongs to another listing, and what is damaged."""
    lacking = {file.name for file in missing}
    keep = {file.name for file in files if file.name not in lacking}
    keep |= {f"{file.sha256}.part" for file in missing}
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_space(folder: Path, missing: Sequence[BaseFile]) -> None:
    here = sum(path.stat().st_size for path in folder.glob("*.part"))
    needed = sum(file.size_bytes for file in missing) - here
    free = shutil.disk_usage(folder).free
    if needed > 0 and free < needed + SPARE_BYTES:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"the base needs {readable_bytes(needed)} more in {folder}, where {readable_bytes(free)} are free",
            "free some space, or use a home on another disk with --home",
        )
