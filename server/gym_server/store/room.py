"""Check the free space on the hub's disks; below the reserve, no upload begins and no round opens."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_disk_full
from gym_fed.core.text import readable_bytes
from gym_server.state import HubState

log = logging.getLogger("gym_server")

_POLL_SECONDS = 1.0


def free_bytes(state: HubState, config: ServerConfig) -> dict[Path, int]:
    """Return the free space, in bytes, on the disk of every local folder that the hub writes to."""
    database = state.database.sqlite_path
    folders = [
        state.store.staging,
        state.folder / Path(config.storage.objects),
        *([database.parent] if database is not None else []),
    ]
    return {folder: shutil.disk_usage(folder).free for folder in folders if folder.is_dir()}


def shortage(state: HubState, config: ServerConfig) -> GymError | None:
    """Return a ``DISK_FULL`` error for a folder with less free space than the reserve; None if all have enough."""
    reserve = config.storage.reserve_bytes
    for folder, free in free_bytes(state, config).items():
        if free < reserve:
            return GymError(
                ErrorCode.DISK_FULL,
                f"{readable_bytes(free)} are free on the disk of {folder}, below the reserve of "
                f"{readable_bytes(reserve)} (storage.reserve_bytes)",
                "free some space there (gym-server gc); the hub then continues by itself",
            )
    return None


def raise_if_full(error: Exception) -> None:
    """Re-raise a library's error about a full disk as ``OSError`` with ``ENOSPC``, which does not end the round."""
    if is_disk_full(error) or (isinstance(error, GymError) and error.code is ErrorCode.DISK_FULL):
        raise OSError(errno.ENOSPC, str(error)) from error


def wait_for_room(state: HubState, config: ServerConfig, should_stop: Callable[[], bool]) -> None:
    """Wait until every disk has more free space than the reserve, or ``should_stop`` returns True."""
    short = shortage(state, config)
    if short is None:
        return
    log.error("disk-full: %s; no round opens until there is free space: %s", short.message, short.hint)
    while shortage(state, config) is not None and not should_stop():
        time.sleep(_POLL_SECONDS)
    if not should_stop():
        log.info("the disk has free space again; rounds continue")
