"""Serve a site, in the foreground for `gym webui` or in a thread for a hub's dashboard."""

from __future__ import annotations

import asyncio
import html
import logging
import socket
import threading
import time
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory

from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.config.serving import ConnectionsConfig
from gym_fed.core.addresses import is_loopback, listening_socket, url_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.portable import on_stop_signals
from gym_fed.serving.http.connections import NO_PROXIES, LimitedServer, Tls
from gym_fed.serving.http.proxies import Proxies
from gym_fed.web.access import Access, WebKeys, new_token
from gym_fed.web.app import Face, create_app

_CONNECTIONS = ConnectionsConfig(max_connections=600)
"""Limits on connections, open streams included. Idle and slow connections are closed, to leave file descriptors for the
hub."""
_STOP_SECONDS = 3
_LOGIN_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>gym-fed</title>
<p><a href="{url}">Open the page</a></p>
"""

_log = logging.getLogger(__name__)


class WebServer:
    """A web server with its own address, which is bound on creation; ``run`` or ``start`` serves.

    Args:
        face: Site to serve.
        listen: Address as ``host:port``; port 0 for a free port.
        keys: File of keys, for an address that other machines can reach.
        public: True if everyone may view the site.
        tls: TLS certificate; None for plain HTTP, on loopback or behind a proxy.
        add_key: Command that adds a key, for the hint.
        proxies: Reverse proxies in front of it. With a trusted proxy, keys replace the token in the printed URL.
        unused_seconds: Seconds without an open page after which the server stops; None for never.

    Raises:
        GymError: ``ADDRESS_IN_USE``; ``USAGE`` for an invalid address, or one that others can reach while no
            key exists.
    """

    def __init__(
        self,
        face: Face,
        listen: str,
        *,
        keys: WebKeys,
        public: bool = False,
        tls: Tls | None = None,
        add_key: str,
        proxies: Proxies = NO_PROXIES,
        unused_seconds: float | None = None,
    ) -> None:
        is_local = is_loopback(f"//{listen}") and not proxies.trusted
        if not is_local and not public and not keys.all():
            raise GymError(
                ErrorCode.USAGE,
                f"{listen} is reachable from other machines, but nobody could log in: {keys.path} has no key",
                f"add one: {add_key}",
            )
        self._listener = bound(listen)
        port = self._listener.getsockname()[1]
        self.address = url_of(self._listener, "http" if tls is None else "https")
        """The URL without a token."""
        token = new_token() if is_local else None
        self.url = self.address if token is None else f"{self.address}/login?token={token}"
        """The URL to print, with the token if there is one."""
        self._access = Access(f"gym_{face.name}_{port}", token=token, keys=keys, public=public)
        self._feed = face.feed
        self._unused_seconds = unused_seconds
        self.app = create_app(face, self._access)
        """The application behind the address."""
        self._server = LimitedServer(self.app, _CONNECTIONS, tls, stop_seconds=_STOP_SECONDS, proxies=proxies)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._login_page: TemporaryDirectory[str] | None = None

    def open_browser(self) -> None:
        """Open the page in the user's browser, logged in.

        Other users can read a browser's command line and log in first, so it does not contain the token. Instead the
        browser opens a file that only this user can read, which is removed after the login or when the server stops.
        """
        if self.url == self.address:
            webbrowser.open(self.address)
            return
        self._login_page = folder = _private_folder()
        page = Path(folder.name) / "login.html"
        url = f"{self.address}/login?token={self._access.single_login(folder.cleanup)}"
        write_atomically(page, _LOGIN_PAGE.format(url=html.escape(url)).encode(), mode=0o600)
        webbrowser.open(page.as_uri())

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; requires the main thread."""

        async def serve() -> None:
            on_stop_signals(lambda number: self._server.handle_exit(number, None))
            await self._serve()

        try:
            asyncio.run(serve())
        finally:
            self._close()

    def end(self) -> None:
        """Make ``run`` return, from any thread."""
        self._server.should_exit = True

    def start(self) -> None:
        """Serve in a thread until ``stop`` is called. Failures are only logged."""
        self._thread = threading.Thread(target=self._run_in_thread, name="web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread of ``start``: streams end, and requests get a few seconds to finish."""
        self.end()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS + 2)
        self._close()

    def _close(self) -> None:
        self._listener.close()
        if self._login_page is not None:
            self._login_page.cleanup()

    def _run_in_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except (Exception, SystemExit):  # noqa: BLE001 (the hub keeps running; uvicorn exits if it cannot start)
            _log.exception("the web server at %s failed", self.address)

    async def _serve(self) -> None:
        tasks = [
            asyncio.create_task(self._end_streams()),
            asyncio.create_task(self._server.connections.watch()),
        ]
        if self._unused_seconds is not None:
            tasks.append(asyncio.create_task(self._end_unused(self._unused_seconds)))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()

    async def _end_streams(self) -> None:
        """End the streams when the server stops, since it would otherwise wait for them."""
        while not self._server.should_exit:
            await asyncio.sleep(0.2)
        self._feed.close()

    async def _end_unused(self, seconds: float) -> None:
        """Stop the server when no page has been open for that time; each open page has a stream."""
        used_at = time.monotonic()
        while time.monotonic() - used_at < seconds:
            await asyncio.sleep(min(1.0, seconds / 4))
            if len(self._feed):
                used_at = time.monotonic()
        self.end()


def _private_folder() -> TemporaryDirectory[str]:
    """Create a folder of mode 0700 that a browser can read.

    A browser in a snap has its own ``/tmp`` and cannot read hidden folders, so the folder is in the home directory; if
    that is not writable, it is in the system's temporary folder.
    """
    try:
        return TemporaryDirectory(prefix="gym-login-", dir=Path.home(), ignore_cleanup_errors=True)
    except (OSError, RuntimeError):
        return TemporaryDirectory(prefix="gym-login-", ignore_cleanup_errors=True)


def bound(listen: str) -> socket.socket:
    """Bind the listening socket of ``host:port``.

    Raises:
        GymError: ``ADDRESS_IN_USE`` if another process uses the port; ``USAGE`` for an invalid address.
    """
    try:
        host, port = Endpoint.parse(listen, least_port=0)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, str(error), "write host:port, such as 127.0.0.1:7860") from error
    return listening_socket(host.strip("[]"), port, "choose another port, or 0 for a free one")
