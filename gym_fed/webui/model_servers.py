"""The servers of the models loaded on the ``play`` screen."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.naming import present_store
from gym_fed.web.events import PageEvent
from gym_fed.web.model_server import ModelServer
from gym_fed.webui.inventory import find_base
from gym_fed.webui.workbench import Workbench

MAX_SERVERS = 2
"""Maximum servers: one, or two for a comparison."""


class ModelServers:
    """The running model servers. Safe from any thread."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._servers: dict[str, ModelServer] = {}
        self._lock = threading.Lock()

    def serve(self, bases: Sequence[str]) -> None:
        """Load exactly these models; models that are already loaded stay.

        Raises:
            GymError: ``MODEL_NOT_FOUND``; ``USAGE`` for too many.
        """
        chosen = list(dict.fromkeys(bases))
        if len(chosen) > MAX_SERVERS:
            raise GymError(
                ErrorCode.USAGE,
                f"{len(chosen)} models at once; {MAX_SERVERS} are compared at most",
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
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{base} {state}", "choose it, and wait until it is said to be ready"
        )

    def facts(self) -> list[dict[str, Any]]:
        """Return the state of every server for pages."""
        with self._lock:
            return [server.facts() for server in self._servers.values()]

    @staticmethod
    def _is_usable(server: ModelServer) -> bool:
        """Return False for a failed server, or one started before the first variant was created."""
        return server.status in ("loading", "ready") and (server.has_variants or present_store() is None)

    def _publish(self) -> None:
        self._workbench.feed.publish(PageEvent("serving", self.facts()))


@functools.cache
def servers_of(workbench: Workbench) -> ModelServers:
    """Return the servers shared by a workbench's screens."""
    return ModelServers(workbench)
