"""A uvicorn server with limits on the number of connections, in total and per address, and on their idle times.

The server closes connections that send no request, send one too slowly, or do not read the response. If there are too
many, it closes one without a request for a new one, so that idle connections never block others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gym_fed.config.serving import ConnectionsConfig
from gym_fed.core.addresses import network_of
from gym_fed.core.files import raise_file_limit
from gym_fed.serving.http.proxies import BehindProxy, Proxies
from gym_fed.trust.identity.tls import private_pem, server_context

_log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Maximum size in bytes of a request's headers, including the first line."""
NO_PROXIES = Proxies()
_LOOK_SECONDS = 0.5
_MINUTE_SECONDS = 60.0


@dataclass(frozen=True)
class Tls:
    """A TLS certificate.

    Attributes:
        certificate: The certificate in PEM.
        key: The private key in PEM.
        passphrase: The passphrase of an encrypted key.
    """

    certificate: Path
    key: Path
    passphrase: str | None = None

    def context(self, *_: object) -> ssl.SSLContext:
        """Return the TLS context of an encrypted key, for uvicorn."""
        return server_context(
            self.certificate, private_pem(self.key, lambda _: str(self.passphrase).encode())
        )


class LimitedServer(uvicorn.Server):
    """A uvicorn server with limited connections, which leaves signal handling to its caller.

    Args:
        app: The application.
        limits: Limits and timeouts of connections. TLS handshakes are limited like a request's headers.
        tls: The TLS certificate; None for plain HTTP.
        stop_seconds: Seconds that requests may take to finish once the server is stopping.
        proxies: The reverse proxies in front of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionsConfig,
        tls: Tls | None,
        *,
        stop_seconds: int,
        proxies: Proxies = NO_PROXIES,
    ) -> None:
        self.connections = Connections(limits, proxies)
        self._handshake_seconds = limits.header_seconds
        super().__init__(
            uvicorn.Config(
                BehindProxy(app, proxies),
                proxy_headers=False,  # uvicorn would trust every program on this machine
                http=self.connections.protocol(),
                ws="none",
                access_log=False,
                log_config=None,
                log_level="error",  # a warning for every malformed request would fill the disk
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=stop_seconds,
                ssl_certfile=None if tls is None else str(tls.certificate),
                ssl_keyfile=None if tls is None else str(tls.key),
                ssl_context_factory=None if tls is None or tls.passphrase is None else tls.context,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen like uvicorn, but limit the TLS handshake, for which asyncio would wait a minute."""
        config, loop = self.config, asyncio.get_running_loop()
        if config.ssl is None or not sockets:
            await super().startup(sockets)
            return

        def protocol() -> asyncio.Protocol:
            http: Any = config.http_protocol_class
            made = http(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            return cast(asyncio.Protocol, made)

        self.servers = [
            await loop.create_server(
                protocol,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_seconds,
            )
            for listener in sockets
        ]
        self.started = True


class Connections:
    """The connections of one server, for use only in the event loop.

    Args:
        config: Limits and timeouts.
        proxies: Reverse proxies; trusted ones have no limit per address, since all their clients share it.
    """

    def __init__(self, config: ConnectionsConfig, proxies: Proxies = NO_PROXIES) -> None:
        self._config, self._proxies = config, proxies
        self._most = raise_file_limit(config.max_connections, _log)
        self._open: dict[Any, None] = {}  # oldest first
        self._by_address: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._logged_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self) -> type[asyncio.Protocol]:
        """Return a subclass of uvicorn's protocol whose connections are counted here."""

        class Counted(_Counted):
            connections_of_server = self

        return Counted

    async def watch(self) -> None:
        """Close slow connections until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for connection in list(self._open):
                why = connection.too_slow(now, self._config)
                if why:
                    self._close(connection, why)
            if self._closed and now - self._logged_at >= _MINUTE_SECONDS:
                self._logged_at = now
                counts = ", ".join(f"{count} {why}" for why, count in sorted(self._closed.items()))
                _log.info("connections closed: %s", counts)
                self._closed.clear()

    def add(self, connection: Any, address: str) -> None:
        """Count a new connection, and close one if there are too many."""
        self._open[connection] = None
        self._by_address[address] += 1
        if self._by_address[address] > self._config.max_per_address and not self._proxies.trusts(address):
            self._make_room(
                [other for other in self._open if other.address == address], "too many from one address"
            )
        elif len(self._open) > self._most:
            self._make_room(list(self._open), "too many")

    def remove(self, connection: Any) -> None:
        """Stop counting a closed connection."""
        if connection in self._open:
            del self._open[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def _make_room(self, among: list[Any], why: str) -> None:
        """Close the oldest connection that is not being answered, or the newest if all of them are."""
        idle = [other for other in among[:-1] if not other.is_busy]
        self._close(idle[0] if idle else among[-1], why)

    def _close(self, connection: Any, why: str) -> None:
        self._closed[why] += 1
        connection.end()
        self.remove(connection)


class _Counted(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that tracks the progress of its request."""

    connections_of_server: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._since = self._moved = time.monotonic()
        self._came = self._unsent = 0
        self._phase: Any = None
        peer = transport.get_extra_info("peername")
        self.address = _network(str(peer[0])) if isinstance(peer, tuple) else ""
        self.connections_of_server.add(self, self.address)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_server.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._came += len(data)
        if not self.is_busy and self._came > MAX_HEADER_BYTES + len(data):
            self.end()
            return
        super().data_received(data)
        self._note_phase()

    @property
    def is_busy(self) -> bool:
        """True if a request's headers have arrived and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def too_slow(self, now: float, config: ConnectionsConfig) -> str:
        """Return why the connection must be closed; empty if it may continue."""
        self._note_phase()
        if not self.is_busy:
            return "without a request" if now - self._since > config.header_seconds else ""
        if self.cycle.more_body and not self.flow.read_paused:
            allowed = config.body_seconds + self._came / config.min_bytes_per_second
            return "with a slow body" if now - self._since > allowed else ""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._moved = unsent, now
        return "that did not read the answer" if now - self._moved > config.stalled_seconds else ""

    def end(self) -> None:
        """Close the connection immediately, and drop pending writes."""
        if not self.transport.is_closing():
            self.transport.abort()

    def _note_phase(self) -> None:
        """Reset the times and byte counts when a request begins, and when its answer is complete."""
        phase = (self.cycle, self.is_busy)
        if phase != self._phase:
            self._phase = phase
            self._since = self._moved = time.monotonic()
            self._came = 0


def _network(host: str) -> str:
    try:
        return network_of(host.partition("%")[0])
    except ValueError:  # it is a name in tests
        return host
