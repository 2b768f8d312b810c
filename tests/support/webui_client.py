"""A workbench's application without a server: what a browser would get, with and without a login."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from gym_client.web.app import SCREENS_FOLDER as CLIENT_SCREENS
from starlette.testclient import TestClient

from gym_fed import webui
from gym_fed.web.access import Access
from gym_fed.web.app import Face, create_app
from gym_fed.webui.app import routers
from gym_fed.webui.workbench import open_workbench

TOKEN = "the-token-of-the-test"


def webui_client(folder: Path, *, login: bool = True, public: bool = False) -> TestClient:
    """A browser at the workbench of a folder; logged in, it changes things, too.

    Args:
        folder: The workbench's; runs are in ``runs``.
        login: Whether it opens the printed URL first.
        public: Whether everyone is a viewer.
    """
    workbench, routes = open_workbench(folder, folder / "runs"), APIRouter()
    for router in routers(workbench):
        routes.include_router(router)
    screens = Path(webui.__file__).parent / "screens"
    face = Face("webui", "test", screens, routes, workbench.feed, more_screens=(CLIENT_SCREENS,))
    client = TestClient(
        create_app(face, Access("session", token=TOKEN, public=public)), base_url="http://127.0.0.1:7860"
    )
    if login:
        assert client.post("/api/v1/login", json={"key": TOKEN}).status_code == 200
        client.headers["X-CSRF-Token"] = client.get("/api/v1/session").json()["csrf"]
    return client
