"""Helpers for network addresses: listening sockets, loopback checks and the network of a caller."""

from __future__ import annotations

import errno
import ipaddress
import socket
from functools import lru_cache
from urllib.parse import urlsplit

from gym_fed.core.errors import ErrorCode, GymError


def listening_socket(host: str, port: int, hint: str) -> socket.socket:
    """Open a listening socket with Nagle's algorithm disabled on its connections.

    Raises:
        GymError: ``ADDRESS_IN_USE`` if another process uses the port; ``USAGE`` for an invalid address; both
            with ``hint``.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio disables Nagle's algorithm (up to 40 ms per reply) only if the protocol is explicitly TCP.
        listener = socket.socket(*address[:3])
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address[4])
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise GymError(
            ErrorCode.ADDRESS_IN_USE if error.errno == errno.EADDRINUSE else ErrorCode.USAGE,
            f"cannot listen at {host} port {port}: {error.strerror}",
            hint,
        ) from error
    return listener


def host_port(host: str, port: int) -> str:
    """Format ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the ``http://host:port`` URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{host_port(host, port)}"


def is_loopback(url: str) -> bool:
    """Return True if a URL, or a ``Host`` header as ``//HOST:PORT``, names this machine; False if invalid."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def may_connect(host: str, via: str) -> bool:
    """Return True if a machine may connect to ``host``, an address that another party chose.

    The address must not be more private than ``via``, an address that was chosen here, so that no one can make a
    machine connect to itself or into its own network. Names are refused, since they may resolve to anything.

    Args:
        host: The address to connect to.
        via: IP address or name of the other party; ``localhost`` and IP addresses count, other names are global.
    """
    reach = _reach(host)
    return reach is not None and reach >= (_reach("127.0.0.1" if via == "localhost" else via) or _GLOBAL)


_LOOPBACK, _PRIVATE, _GLOBAL = 1, 2, 3


@lru_cache(4096)  # cached, since a hub compares a caller with many seeders
def _reach(host: str) -> int | None:
    """Return how widely an IP address can be reached; None for names and addresses without a host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return _LOOPBACK
    if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        return None
    return _GLOBAL if address.is_global else _PRIVATE


def network_of(host: str) -> str:
    """Return the network of an IP address: an IPv4 address itself, or the /64 prefix of an IPv6 address.

    IPv4-mapped IPv6 addresses count as IPv4. A household usually gets a whole /64.

    Raises:
        ValueError: If ``host`` is not an IP address.
    """
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
