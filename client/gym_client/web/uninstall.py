"""The HTTP routes of `gym-client ui` that delete what the client has written on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response

from gym_client.identity.home import Home
from gym_client.removal import client_files_of, remove
from gym_client.web.contribute import Workplace, without_reports
from gym_fed.config.schema.base import StrictModel
from gym_fed.web.app import Changing, Looking


class UninstallRequest(StrictModel):
    abandon: bool = False
    """True to abandon the accounts on hubs that the client has not left."""


def uninstall_routes(place: Workplace, ended: Callable[[], None]) -> APIRouter:
    """Create the routes under ``/uninstall``. ``ended`` is called after the deletion, to stop the page's server."""
    router = APIRouter()

    @router.get("/uninstall")
    def listed(visitor: Looking) -> dict[str, Any]:
        """List what would be deleted, what would stay, and the hubs that were not left."""
        home = Home.open(place.home)
        removal = client_files_of(home)
        return {
            "folder": str(home.folder),
            "files": [path.name for path in removal.files],
            "others": [path.name for path in removal.others],
            "hubs": list(removal.hubs),
        }

    @router.post("/uninstall")
    def uninstall(given: UninstallRequest, visitor: Changing) -> Response:
        """Delete the files, like `gym-client uninstall --yes`."""
        with without_reports():
            home = Home.open(place.home)
            removal = client_files_of(home)
            removal.require_left(given.abandon)
            remove(home, removal)
        return JSONResponse({"deleted": len(removal.files)}, background=BackgroundTask(ended))

    return router
