"""HTTP proxies for the connections to a hub.

gRPC reads the proxy variables itself, while Python's sockets do not, and gRPC's rules differ from those of other tools.
This module therefore selects the proxy, both for fetching the certificate and for all calls.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gym_client.identity.address import Address
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

VARIABLES = ("grpc_proxy", "https_proxy", "HTTPS_PROXY", "http_proxy")
"""Environment variables in order of precedence. ``HTTP_PROXY`` is ignored, as in other tools, because a client can set
it through a request header in CGI programs."""
EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")

_DEFAULT_PORT = 3128
_MAX_ANSWER_BYTES = 16 << 10


@dataclass(frozen=True)
class Proxy:
    """A proxy that tunnels TCP connections (``CONNECT``).

    Attributes:
        variable: Environment variable that specifies the proxy.
        credentials: ``user:password``; empty if there are none.
    """

    host: str
    port: int
    variable: str
    credentials: str = ""

    @property
    def url(self) -> str:
        """The URL including the password, for gRPC; it must never appear in a message."""
        user = f"{self.credentials}@" if self.credentials else ""
        return f"http://{user}{Address(self.host, self.port)}"

    def __str__(self) -> str:
        return f"the proxy {Address(self.host, self.port)} ({self.variable})"


def proxy_for(address: Address, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy for a hub; None for a direct connection, which is always used for loopback addresses.

    Raises:
        GymError: ``USAGE`` if a variable is not the URL of an HTTP proxy.
    """
    variable = next((name for name in VARIABLES if environment.get(name, "").strip()), None)
    if variable is None or address.is_loopback:
        return None
    exceptions = next((environment[name] for name in EXCEPTIONS if environment.get(name)), "")
    if any(_covers(entry.strip(), address.host) for entry in exceptions.split(",")):
        return None
    return _parse(environment[variable].strip(), variable, address.host)


def connect(address: Address, seconds: float) -> socket.socket:
    """Open a TCP connection to a hub, through the proxy if there is one.

    Raises:
        GymError: ``UNAVAILABLE`` if the proxy is unreachable or refuses the connection; ``USAGE`` as in ``proxy_for``.
        OSError: If the hub cannot be reached directly.
    """
    proxy = proxy_for(address)
    if proxy is None:
        return socket.create_connection((address.host, address.port), timeout=seconds)
    hint = f"check {proxy.variable}, or add {address.host} to no_proxy to reach the hub directly"
    try:
        stream = socket.create_connection((proxy.host, proxy.port), timeout=seconds)
    except OSError as error:
        text = f"cannot reach {proxy} on the way to {address}: {error.strerror or error}"
        raise GymError(ErrorCode.UNAVAILABLE, text, hint) from error
    try:
        status = _ask(stream, proxy, address)
    except OSError as error:
        stream.close()
        text = f"{proxy} closed the tunnel to {address}: {error.strerror or error}"
        raise GymError(ErrorCode.UNAVAILABLE, text, hint) from error
    words = status.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or words[1] != "200":
        stream.close()
        text = f"{proxy} refuses a tunnel to {address}: {plain(status, 80) or 'no answer'}"
        raise GymError(ErrorCode.UNAVAILABLE, text, hint)
    return stream


def _ask(stream: socket.socket, proxy: Proxy, address: Address) -> str:
    """Request the tunnel and return the first line of the reply."""
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.credentials:
        token = base64.b64encode(unquote(proxy.credentials).encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {token}")
    try:
        request = "\r\n".join([*lines, "", ""]).encode("ascii")
    except UnicodeEncodeError as error:
        raise GymError(
            ErrorCode.USAGE,
            f"the host name {address.host!r} cannot be sent to a proxy",
            "write it in its ASCII form (xn--...)",
        ) from error
    stream.sendall(request)
    answer = b""
    while not answer.endswith(b"\r\n\r\n") and len(answer) < _MAX_ANSWER_BYTES:
        byte = stream.recv(1)  # bytes after the empty line already come from the hub
        if not byte:
            break
        answer += byte
    return answer.partition(b"\r\n")[0].decode("latin-1")


def _covers(entry: str, host: str) -> bool:
    """Return True if an entry of ``no_proxy`` (``*``, a name, a suffix, an address or a network) matches a host."""
    if entry == "*":
        return True
    name = entry.lower().removeprefix("*").removeprefix(".")
    if name and (host.lower() == name or host.lower().endswith(f".{name}")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _parse(text: str, variable: str, host: str) -> Proxy:
    refusal = GymError(
        ErrorCode.USAGE,
        f"{variable} is not an HTTP proxy: only http://HOST:PORT is supported",
        f"correct {variable}, set grpc_proxy for gym-client, or add {host} to no_proxy",
    )
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host_name, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError as error:
        raise refusal from error
    if parts.scheme != "http" or not host_name:
        raise refusal
    return Proxy(host_name, port, variable, parts.netloc.rpartition("@")[0])
