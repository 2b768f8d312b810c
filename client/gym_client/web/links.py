"""The HTTP routes of `gym-client ui` for opening invites with a click, like `gym-client install-links`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter

from gym_client.identity.home import Home
from gym_client.link_handler import link_handler_of
from gym_fed.config.schema.base import StrictModel
from gym_fed.web.app import Changing, Looking


class LinksRequest(StrictModel):
    is_registered: bool


def link_routes(home: Home, passphrase_file: Path | None) -> APIRouter:
    """Create the routes under ``/links``."""
    router = APIRouter()

    def found() -> dict[str, Any]:
        return {"is_registered": link_handler_of(home, passphrase_file).is_registered()}

    @router.get("/links")
    def state(visitor: Looking) -> dict[str, Any]:
        """Return whether ``gym://`` links open the page of this home."""
        return found()

    @router.post("/links")
    def change(given: LinksRequest, visitor: Changing) -> dict[str, Any]:
        """Register the link handler, or remove it."""
        handler = link_handler_of(home, passphrase_file)
        if given.is_registered:
            handler.add()
        else:
            handler.remove()
        return found()

    return router
