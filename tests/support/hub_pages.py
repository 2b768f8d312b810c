"""The API of a hub's pages without a server: what an operator and what everybody else is answered."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from gym_server.federation import Federation
from gym_server.web import dashboard, health
from gym_server.web.feed import HubFeed
from gym_server.web.hub_view import HubView
from gym_server.web.newest_model import NewestModel
from starlette.testclient import TestClient

from gym_fed.web.access import CSRF_HEADER, Access
from gym_fed.web.app import Face, create_app

ADDRESS = "http://127.0.0.1:9444"
TOKEN = "the-token-of-the-url"


class HubPages:
    """The pages of a hub, open to everybody as viewers.

    Attributes:
        fed: The hub.
        operator: Who came by the printed URL.
        viewer: Anybody.
    """

    def __init__(self, fed: Federation, is_running: bool = True, newest: NewestModel | None = None) -> None:
        self.fed = fed
        view, routes = HubView(fed.state, fed.live_config, is_running, newest), APIRouter()
        for router in dashboard.routers(fed, view):
            routes.include_router(router)
        face = Face(
            "hub",
            fed.config.name,
            dashboard.SCREENS_FOLDER,
            routes,
            HubFeed(fed.state, fed.live_config, fed.lease_histories).feed,
            health.beside(view, fed.traffic, fed.contributor_clocks),
        )
        app = create_app(face, Access("session", token=TOKEN, public=True))
        self.operator, self.viewer = (TestClient(app, base_url=ADDRESS) for _ in range(2))
        self.operator.get(f"/login?token={TOKEN}", follow_redirects=False)
        self._csrf = self.operator.get("/api/v1/session").json()["csrf"]

    def get(self, path: str, **query: Any) -> Any:
        """What an operator is shown."""
        return self._answer(self.operator.get(f"/api/v1/{path}", params=query))

    def seen(self, path: str, **query: Any) -> Any:
        """What everybody is shown."""
        return self._answer(self.viewer.get(f"/api/v1/{path}", params=query))

    def change(self, path: str, method: str = "POST", **body: Any) -> Any:
        """What an operator's page sends."""
        found = self.operator.request(method, f"/api/v1/{path}", json=body, headers={CSRF_HEADER: self._csrf})
        return self._answer(found)

    @staticmethod
    def _answer(response: Any) -> Any:
        found = response.json()
        return (response.status_code, found["error"]) if "error" in found else found
