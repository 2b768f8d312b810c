"""The models and variants on this machine, listed without loading them, and the servers of loaded models."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.store.naming import present_store
from gym_fed.web.events import PageEvent
from gym_fed.web.model_server import ModelServer
from gym_fed.webui.workbench import MAX_ROWS, Workbench

_CONFIGS = ("config.json", "adapter_config.json")
_SKIPPED = frozenset({"node_modules", "__pycache__", "checkpoints", "objects", "site-packages"})
_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000
"""Maximum number of folders to search, so that a workbench in a home folder stays responsive."""


MAX_SERVERS = 2
"""Maximum number of servers: one, or two for a comparison."""


class ModelServers:
    """The running model servers. Safe from any thread."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._servers: dict[str, ModelServer] = {}
        self._lock = threading.Lock()

    def serve(self, bases: Sequence[str]) -> None:
        """Load exactly these models; those that are loaded already are kept.

        Raises:
            GymError: ``MODEL_NOT_FOUND``; ``USAGE`` for too many.
        """
        chosen = list(dict.fromkeys(bases))
        if len(chosen) > MAX_SERVERS:
            raise GymError(
                ErrorCode.USAGE,
                f"{counted(len(chosen), 'model')} at once; at most {MAX_SERVERS} are compared",
                "choose fewer",
            )
        for base in chosen:
            find_base(self._workbench, base)
        with self._lock:
            for base, server in list(self._servers.items()):
                if base not in chosen or not self._is_usable(server):
                    self._servers.pop(base).stop()
            for base in chosen:
                if base not in self._servers:
                    store = present_store()
                    self._servers[base] = ModelServer(base, self._workbench.folder, store, self._publish)
        self._publish()

    def ready(self, base: str) -> ModelServer:
        """Return the server of a loaded model.

        Raises:
            GymError: ``UNAVAILABLE`` with a remedy.
        """
        server = self._servers.get(base)
        if server is not None and server.status == "ready":
            return server
        state = (
            "is not loaded" if server is None else "is loading" if server.status == "loading" else "failed"
        )
        raise GymError(ErrorCode.UNAVAILABLE, f"{base} {state}", "choose it, and wait until it is ready")

    def facts(self) -> list[dict[str, Any]]:
        """Return the state of every server for pages."""
        with self._lock:
            return [server.facts() for server in self._servers.values()]

    @staticmethod
    def _is_usable(server: ModelServer) -> bool:
        """Return False for a server that has failed, or was started before the first variant was created."""
        return server.status in ("loading", "ready") and (server.has_variants or present_store() is None)

    def _publish(self) -> None:
        self._workbench.feed.publish(PageEvent("serving", self.facts()))


@functools.cache
def servers_of(workbench: Workbench) -> ModelServers:
    """Return the servers that the screens of a workbench share."""
    return ModelServers(workbench)


@dataclass(frozen=True)
class LocalModel:
    """A model that `gym api --base ID` can load.

    Attributes:
        id: Name in commands: ``gym-nano``, a name in the cache, or a path relative to the workbench's folder.
        name: Name in variants' records.
        kind: ``package``, ``cache``, ``run``, ``folder``, ``adapter`` or ``gguf``.
        bytes: Total size of its files.
        changed_at: Modification time in Unix seconds; 0 for bundled models and those of the Hub.
    """

    id: str
    name: str
    kind: str
    bytes: int
    changed_at: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return the model's properties for pages."""
        return asdict(self)


def local_bases(workbench: Workbench) -> list[LocalModel]:
    """List the models in the package, the cache and the workbench's folders."""
    from gym_fed.base.downloads.local import local_models

    models = [
        LocalModel(row["name"], row["name"], row["where"], row["bytes"])
        for row in local_models()
        if row["where"] in ("package", "cache") and row["whole"]
    ]
    return [*models, *_below(workbench)][:MAX_ROWS]


def find_base(workbench: Workbench, id: str) -> LocalModel:
    """Return the model with this id.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` if it is not in ``local_bases``.
    """
    match = next((model for model in local_bases(workbench) if model.id == id), None)
    if match is None:
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{id!r} is not among the models of this machine",
            "gym webui lists the models below the folder where it was started, and those of gym models list",
        )
    return match


def local_variants() -> list[dict[str, Any]]:
    """List the variants on this machine, newest first, in the format of `gym variant list --json`."""
    from gym_fed.serving.store.store import VariantStore

    folder = present_store()
    if folder is None:
        return []
    with VariantStore.open(folder, create=False, require_signature=False) as store:
        variants = [record.to_dict() for record in store.list()]
    return sorted(variants, key=lambda row: row["updated_at"], reverse=True)[:MAX_ROWS]


def _below(workbench: Workbench) -> list[LocalModel]:
    roots = [workbench.folder]
    if workbench.folder not in workbench.runs.parents:
        roots.append(workbench.runs)
    models: dict[Path, LocalModel] = {}
    for root in roots:
        for num_folders, (place, folders, files) in enumerate(os.walk(root)):
            folder = Path(place)
            depth = len(folder.relative_to(root).parts)
            if num_folders >= _MAX_FOLDERS:
                break
            folders[:] = (
                sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
                if depth < _MAX_DEPTH
                else []
            )
            for file in files:
                if file.endswith(".gguf"):
                    models.setdefault(folder / file, _file_model(workbench, folder / file))
            if any(name in files for name in _CONFIGS):
                models.setdefault(folder, _folder_model(workbench, folder, files))
                folders[:] = []
    return sorted(models.values(), key=lambda model: model.changed_at, reverse=True)


def _folder_model(workbench: Workbench, folder: Path, files: list[str]) -> LocalModel:
    is_run = "run.json" in files or "result.json" in files
    kind = "run" if is_run else "adapter" if "adapter_config.json" in files else "folder"
    sizes = [status for name in files if (status := _status(folder / name)) is not None]
    changed_at = max((status.st_mtime for status in sizes), default=0.0)
    return LocalModel(
        workbench.named(folder), folder.name, kind, sum(status.st_size for status in sizes), changed_at
    )


def _file_model(workbench: Workbench, file: Path) -> LocalModel:
    status = _status(file)
    size, changed_at = (0, 0.0) if status is None else (status.st_size, status.st_mtime)
    return LocalModel(workbench.named(file), file.name, "gguf", size, changed_at)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # a broken link
        return None
