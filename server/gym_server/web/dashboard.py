"""The dashboard server, with the screens' routes and event feed; it runs on a thread of the hub or standalone."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from gym_fed.config.hub.sections import DashboardConfig
from gym_fed.core.addresses import is_loopback
from gym_fed.serving.http.connections import Tls
from gym_fed.serving.http.proxies import Proxies
from gym_fed.trust.identity.keys import is_encrypted
from gym_fed.web.access import KEYS_NAME, WebKeys
from gym_fed.web.app import Face
from gym_fed.web.events import PageEvent
from gym_fed.web.server import WebServer
from gym_server.federation import Federation
from gym_server.web import (
    contributors,
    health,
    home,
    invites,
    ledger,
    members,
    model,
    privacy,
    rounds,
    variants,
)
from gym_server.web.feed import HubFeed
from gym_server.web.hub_view import HubView
from gym_server.web.newest_model import NewestModel

SCREENS_FOLDER = Path(__file__).parent / "screens"
"""Folder of the pages' scripts."""


def routers(fed: Federation, view: HubView) -> list[APIRouter]:
    """Return the API's routes, one router per screen."""
    return [
        home.routes(view, fed.lease_histories, fed.fingerprint),
        rounds.routes(view),
        contributors.routes(view, fed.payouts, fed.keys),
        model.routes(view),
        privacy.routes(view),
        ledger.routes(view),
        members.routes(view, fed.fingerprint),
        invites.routes(view, fed.accounts, fed.fingerprint),
        variants.routes(view, fed.variants),
        health.routes(view, fed.traffic),
    ]


class Dashboard:
    """The dashboard of one hub. Construction binds the address.

    Args:
        fed: The hub.
        listen: Address as ``host:port``.
        public: True if everybody may view it without a key.
        is_running: True if the hub's rounds run in this process.
        proxies: Reverse proxies in front of it; None uses those of the config.

    Raises:
        GymError: ``ADDRESS_IN_USE``, ``USAGE``.
    """

    def __init__(
        self,
        fed: Federation,
        listen: str,
        *,
        public: bool,
        is_running: bool,
        proxies: Proxies | None = None,
    ) -> None:
        config = fed.config.dashboard or DashboardConfig()
        self._feed = HubFeed(fed.state, fed.live_config, fed.lease_histories)
        self._newest = self._newest_model(fed, is_running)
        view = HubView(fed.state, fed.live_config, is_running, self._newest)
        routes = APIRouter()
        for router in routers(fed, view):
            routes.include_router(router)
        beside = health.beside(view, fed.traffic, fed.contributor_clocks)
        face = Face("hub", fed.config.name, SCREENS_FOLDER, routes, self._feed.feed, beside)
        self.server = WebServer(
            face,
            listen,
            keys=WebKeys(fed.folder / "keys" / KEYS_NAME),
            public=public,
            tls=_tls(fed, listen),
            add_key=f"gym-server dashboard-keys add NAME --role operator --dir {fed.folder}",
            proxies=proxies or Proxies(config.root_path, tuple(config.trusted_proxies)),
        )

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Return the URL to print, with the token if there is one."""
        return self.server.url

    def start(self) -> None:
        """Serve on a thread until ``stop``."""
        self._begin()
        self.server.start()

    def run(self) -> None:
        """Serve until a signal arrives."""
        self._begin()
        try:
            self.server.run()
        finally:
            self._end()

    def stop(self) -> None:
        """Stop serving and release the address."""
        self._end()
        self.server.stop()

    def _newest_model(self, fed: Federation, is_running: bool) -> NewestModel | None:
        """Create the server of the newest model, which notifies the pages of changes; None if it is not enabled."""
        if fed.config.dashboard is None or not fed.config.dashboard.ask:
            return None
        news = PageEvent("newest-model", {})
        return NewestModel(
            fed.state, fed.live_config, is_running=is_running, changed=lambda: self._feed.feed.publish(news)
        )

    def _begin(self) -> None:
        self._feed.start()
        if self._newest is not None:
            self._newest.start()

    def _end(self) -> None:
        self._feed.stop()
        if self._newest is not None:
            self._newest.stop()


def _tls(fed: Federation, listen: str) -> Tls | None:
    """Return the hub's own certificate if the pages are reachable from other machines; else None."""
    if is_loopback(f"//{listen}"):
        return None
    certificate, key = (fed.folder / "keys" / name for name in ("tls.crt", "tls.key"))
    secret = fed.passphrase.get(str(key)).decode() if is_encrypted(key.read_bytes()) else None
    return Tls(certificate, key, secret)
