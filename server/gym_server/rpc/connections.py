"""The hub's TCP port: check that it is free, and limit the connections per address.

gRPC accepts connections by itself and limits only their total number, so one address could use all of them. The limiter
inspects the process's own sockets and closes connections beyond an address's limit, starting with the oldest that never
made a call. It reads ``/proc/self/fd`` and so requires Linux; on other systems use a firewall.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from gym_fed.core.addresses import network_of
from gym_fed.core.errors import ErrorCode, GymError

log = logging.getLogger("gym_server")

_FILES = Path("/proc/self/fd")
_PAUSE_SECONDS = 0.5
_LARGEST_SHARE = 0.05
"""Maximum share of one core's time that the limiter may use."""
_MAX_CALLERS = 20_000


def require_free(address: str) -> None:
    """Check that no process listens on an address, or on a wildcard address that includes it.

    Args:
        address: Address as ``host:port``.

    Raises:
        GymError: ``ADDRESS_IN_USE``; ``CONFIG_INVALID`` if this machine does not have the address.
    """
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(
                host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, OverflowError) as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"listen: {address} is not an address of this machine: {error}"
            ) from error
        for family, kind, protocol, _, where in found:
            probe = stack.enter_context(socket.socket(family, kind, protocol))
            if family == socket.AF_INET6:
                probe.setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::"
                )  # "::" accepts IPv4 connections too
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may be in TIME_WAIT
            try:
                probe.bind(where)  # fails if another process listens
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise GymError(
                        ErrorCode.ADDRESS_IN_USE,
                        f"cannot listen on {address}: another process listens on port {port}",
                        "stop that process, change `listen`, or use --set listen=127.0.0.1:0",
                    ) from error


class ConnectionLimiter:
    """Closes connections beyond an address's limit, on its own thread.

    Args:
        per_address: Maximum number of connections per address (per /64 network for IPv6).
    """

    def __init__(self, per_address: int) -> None:
        self._port, self._per_address = 0, per_address
        self._callers: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._since: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="connection-limiter", daemon=True)
        self.hung_up = 0
        """Number of connections closed since the start."""

    def start(self, port: int) -> None:
        """Start watching the hub's port; log a warning if the process cannot see its own sockets."""
        self._port = port
        if _FILES.is_dir():
            self._thread.start()
        else:
            log.warning("limits.connections_per_address is not enforced: this system has no %s", _FILES)

    @property
    def open(self) -> int | None:
        """Return the number of connections at the last check; None if the limiter is not running."""
        return len(self._since) if self._thread.is_alive() else None

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def called(self, peer: str) -> None:
        """Record that a connection was used for a call.

        Args:
            peer: Remote address of the connection, in gRPC's notation.
        """
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        with contextlib.suppress(ValueError):  # a UNIX socket has no port
            end = (_plain(host), int(port))
            with self._lock:
                self._callers[end] = None
                self._callers.move_to_end(end)
                if len(self._callers) > _MAX_CALLERS:
                    self._callers.popitem(last=False)

    def close_excess(self) -> int:
        """Close the connections beyond each address's limit; return the number of closed ones."""
        now, by_address = time.monotonic(), dict[str, list[tuple[bool, float, tuple[str, int], int]]]()
        since: dict[tuple[str, int], float] = {}
        with self._lock:
            callers = set(self._callers)
        for number, end in self._connections():
            since[end] = self._since.get(end, now)
            by_address.setdefault(network_of(end[0]), []).append((end in callers, since[end], end, number))
        self._since = since
        ended = 0
        for address, found in by_address.items():
            surplus = len(found) - self._per_address
            if surplus > 0:
                mute = sorted(entry for entry in found if not entry[0])
                talking = sorted((entry for entry in found if entry[0]), reverse=True)
                closed = sum(_hang_up(number, end) for _, _, end, number in [*mute, *talking][:surplus])
                log.info("%s has %d connections; closed %d of them", address, len(found), closed)
                ended += closed
        self.hung_up += ended
        return ended

    def _watch(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self.close_excess()
            except OSError as error:  # for example, no free file descriptors; the next check may succeed
                log.warning("checking the connections failed: %s", error)
            pause = max(_PAUSE_SECONDS, (time.monotonic() - began) / _LARGEST_SHARE)

    def _connections(self) -> list[tuple[int, tuple[str, int]]]:
        """Return the file descriptors and remote addresses of all connections to the hub's port."""
        found = []
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                if not os.readlink(_FILES / name).startswith("socket:"):
                    continue
            with contextlib.suppress(OSError), _borrowed(int(name)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and (
                    connection.getsockname()[1] == self._port
                ):
                    host, port = connection.getpeername()[:2]  # raises OSError if the socket is not connected
                    found.append((int(name), (_plain(host), port)))
        return found


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Yield a socket of this process by its file descriptor, which is neither duplicated nor closed here.

    Closing any descriptor of a file drops all POSIX locks that this process has on it. If a descriptor of a SQLite file
    were duplicated and closed, the hub would lose its locks. The next command that reads the database would then assume
    that it is the only user, and delete the write-ahead log with acknowledged transactions.

    Raises:
        OSError: If the descriptor is not a socket or is already closed.
    """
    connection = socket.socket(fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _hang_up(number: int, end: tuple[str, int]) -> bool:
    """Shut a connection down if the descriptor still belongs to it; gRPC then closes the descriptor."""
    try:
        with _borrowed(number) as connection:
            host, port = connection.getpeername()[:2]
            if (_plain(host), port) != end:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # the connection was closed in the meantime


def _plain(host: str) -> str:
    """Normalise an address for comparison: map IPv4-mapped addresses to IPv4, and remove brackets and scope."""
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:")
