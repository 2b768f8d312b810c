"""The models that `play` answers with, each a ``ModelServer``: one, or the two that are compared."""

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
"""At once: one model, or the two that are compared."""


class ModelServers:
    """Those that run now; from any thread."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._servers: dict[str, ModelServer] = {}
        self._lock = threading.Lock()

    def serve(self, bases: Sequence[str]) -> None:
        """Have these models loaded, and no others; what is loaded already stays.

        Raises:
            GymError: ``MODEL_NOT_FOUND``; ``USAGE`` for too many.
        """
        wanted = list(dict.fromkeys(bases))
        if len(wanted) > MAX_SERVERS:
            raise GymError(
                ErrorCode.USAGE,
                f"{len(wanted)} models at once; {MAX_SERVERS} are compared at most",
                "choose fewer",
            )
        for base in wanted:
            find_base(self._workbench, base)
        with self._lock:
            for base, server in list(self._servers.items()):
                if base not in wanted or not self._is_usable(server):
                    self._servers.pop(base).stop()
            for base in wanted:
                if base not in self._servers:
                    store = present_store()
                    self._servers[base] = ModelServer(base, self._workbench.folder, store, self._publish)
        self._publish()

    def ready(self, base: str) -> ModelServer:
        """The server of a model that is loaded.

        Raises:
            GymError: ``UNAVAILABLE`` with what to do.
        """
        server = self._servers.get(base)
        if server is not None and server.status == "ready":
            return server
        what = "is not loaded" if server is None else "is loading" if server.status == "loading" else "failed"
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{base} {what}", "choose it, and wait until it is said to be ready"
        )

    def facts(self) -> list[dict[str, Any]]:
        """Of every server, as pages get it."""
        with self._lock:
            return [server.facts() for server in self._servers.values()]

    @staticmethod
    def _is_usable(server: ModelServer) -> bool:
        """One that failed is started again, and so is one of before the first variant was made."""
        return server.status in ("loading", "ready") and (server.has_variants or present_store() is None)

    def _publish(self) -> None:
        self._workbench.feed.publish(PageEvent("serving", self.facts()))


@functools.cache
def servers_of(workbench: Workbench) -> ModelServers:
    """The servers of a workbench, which its screens share."""
    return ModelServers(workbench)
