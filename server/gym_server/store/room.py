"""Room on the hub's disks: below its reserve no upload begins and no round opens."""

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


def shortage(state: HubState, config: ServerConfig) -> GymError | None:
    """``DISK_FULL`` naming the folder of the hub that has less free than the reserve; None where all have more."""
    database = state.database.sqlite_path
    objects = Path(config.storage.objects)
    folders = [
        state.store.staging,
        state.folder / objects,
        *([database.parent] if database is not None else []),
    ]
    reserve = config.storage.reserve_bytes
    for folder in folders:
        if folder.is_dir() and (free := shutil.disk_usage(folder).free) < reserve:
            return GymError(
                ErrorCode.DISK_FULL,
                f"{readable_bytes(free)} are free for {folder}, below the reserve of {readable_bytes(reserve)} "
                "(storage.reserve_bytes)",
                "make room there (gym-server gc); the hub then goes on by itself",
            )
    return None


def raise_if_full(error: Exception) -> None:
    """Raise a full disk, in whatever form a library reports it, as the system's own error: rounds continue after it."""
    if is_disk_full(error) or (isinstance(error, GymError) and error.code is ErrorCode.DISK_FULL):
        raise OSError(errno.ENOSPC, str(error)) from error


def wait_for_room(state: HubState, config: ServerConfig, should_stop: Callable[[], bool]) -> None:
    """Return when the disks have the reserve free, or when ``should_stop`` is true."""
    short = shortage(state, config)
    if short is None:
        return
    log.error("disk-full: %s; no round opens until there is room: %s", short.message, short.hint)
    while shortage(state, config) is not None and not should_stop():
        time.sleep(_POLL_SECONDS)
    if not should_stop():
        log.info("there is room on the disk again; rounds go on")
