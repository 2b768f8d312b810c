"""Reverse proxies in front of a server: a path prefix, and headers that are read only from trusted proxies.

A proxy may serve this server below a prefix, such as ``https://example.org/gym/``. The owner configures the prefix
(``root_path``), or the proxies whose ``X-Forwarded-Prefix`` is trusted. The headers of all other peers are ignored,
since anyone can send them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gym_fed.config.schema.proxy import path_prefix, proxy_network
from gym_fed.core.errors import ErrorCode, GymError

_HEADER = b"x-forwarded-prefix"


@dataclass(frozen=True)
class Proxies:
    """The reverse proxies in front of a server.

    Attributes:
        root_path: Path prefix of the server's URLs, such as ``/gym``; empty for none.
        trusted: IP addresses and networks whose ``X-Forwarded-Prefix``, ``-For`` and ``-Proto`` are trusted.
    """

    root_path: str = ""
    trusted: tuple[str, ...] = ()

    @classmethod
    def parse(cls, root_path: str = "", trusted: Iterable[str] = ()) -> Proxies:
        """Validate command-line options, and create the object.

        Raises:
            GymError: ``USAGE``.
        """
        try:
            return cls(path_prefix(root_path), tuple(map(proxy_network, trusted)))
        except ValueError as error:
            raise GymError(ErrorCode.USAGE, str(error), "see --root-path and --trusted-proxy") from error

    def trusts(self, host: str) -> bool:
        """Return True if the peer at an IP address is a trusted proxy."""
        try:
            address = ipaddress.ip_address(_unmapped(host))
        except ValueError:
            return False
        return any(address in ipaddress.ip_network(network) for network in self.trusted)


class BehindProxy:
    """ASGI middleware that sets ``root_path``, and for trusted proxies also client and scheme.

    A proxy may leave the prefix of ``root_path`` in the path, or remove it. A proxy that sends ``X-Forwarded-Prefix``
    has removed it, as is usual with this header.
    """

    def __init__(self, app: ASGIApp, proxies: Proxies) -> None:
        self._app, self._proxies = app, proxies
        self._trusting = ProxyHeadersMiddleware(app, list(proxies.trusted))  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, port = scope.get("client") or ("", 0)
        trusted = bool(self._proxies.trusted) and self._proxies.trusts(host)
        sent = [value for name, value in scope["headers"] if name == _HEADER] if trusted else []
        try:
            prefix = path_prefix(_only(sent)) if sent else self._proxies.root_path
        except ValueError as error:
            refusal = {"code": ErrorCode.USAGE.value, "message": f"X-Forwarded-Prefix: {error}"}
            await JSONResponse({"error": refusal}, ErrorCode.USAGE.http_status)(scope, receive, send)
            return
        if prefix:
            scope = {**scope, "root_path": prefix, **_below(prefix, scope, is_removed=bool(sent))}
        if trusted:
            scope = {**scope, "client": (_unmapped(host), port)}
            await self._trusting(scope, receive, send)  # type: ignore[arg-type]
        else:
            await self._app(scope, receive, send)


def _only(values: list[bytes]) -> str:
    if len(values) > 1:
        raise ValueError("it was sent more than once; the proxy must replace the client's value")
    return values[0].decode("latin-1")


def _below(prefix: str, scope: Scope, *, is_removed: bool) -> dict[str, str | bytes]:
    """Return ``path`` and ``raw_path`` with the prefix, as ASGI requires with ``root_path``."""
    path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
    if not is_removed and path == prefix:
        return {"path": f"{path}/", "raw_path": raw + b"/"}
    if not is_removed and path.startswith(f"{prefix}/"):
        return {}
    return {"path": prefix + path, "raw_path": prefix.encode() + raw}


def _unmapped(host: str) -> str:
    """Convert an IPv4-mapped IPv6 address, which sockets for both versions report, to IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def prefix_of(scope: Scope) -> str:
    """Return the path prefix under which a client sees this server; empty without one."""
    return str(scope.get("root_path", ""))


def route_path(scope: Scope) -> str:
    """Return a request's path without the prefix, for middleware that wraps an application."""
    path: str = scope["path"]
    return path.removeprefix(prefix_of(scope))
