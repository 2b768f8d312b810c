"""The hub's TCP connections: a free port, and a bound on connections per address.

gRPC accepts connections by itself and counts only their sum, so one address could take every place. The limiter
looks at the process's own sockets and hangs up on what an address has beyond its share: connections that never made a
call first, the oldest of them first. It reads ``/proc/self/fd``, so it works on Linux; elsewhere a firewall has to.
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
"""Of one core, that looking may take."""
_MAX_CALLERS = 20_000


def require_free(address: str) -> None:
    """Whether nobody listens on an address, nor on one that includes it.

    Args:
        address: ``host:port``.

    Raises:
        GymError: ``ADDRESS_IN_USE``, or ``CONFIG_INVALID`` for an address that this machine does not have.
    """
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(
                host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, OverflowError) as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"listen: {address} is no address of this machine: {error}"
            ) from error
        for family, kind, protocol, _, where in found:
            probe = stack.enter_context(socket.socket(family, kind, protocol))
            if family == socket.AF_INET6:
                probe.setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::"
                )  # that is IPv4 too
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
            try:
                probe.bind(where)  # refused where somebody listens
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise GymError(
                        ErrorCode.ADDRESS_IN_USE,
                        f"cannot listen on {address}: another process listens on port {port}",
                        "stop that one, change `listen`, or use --set listen=127.0.0.1:0",
                    ) from error


class ConnectionLimiter:
    """Hangs up on connections beyond an address's share, in a thread of its own.

    Args:
        per_address: Connections of one address (of one /64 of IPv6).
    """

    def __init__(self, per_address: int) -> None:
        self._port, self._per_address = 0, per_address
        self._callers: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._since: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="connection-limiter", daemon=True)
        self.hung_up = 0
        """Connections ended so far."""

    def start(self, port: int) -> None:
        """Watch the port that the hub listens on; where the process cannot see its own sockets, the log says so."""
        self._port = port
        if _FILES.is_dir():
            self._thread.start()
        else:
            log.warning("limits.connections_per_address: not on this system, which has no %s", _FILES)

    @property
    def open(self) -> int | None:
        """Connections at the last look; None where nobody looks."""
        return len(self._since) if self._thread.is_alive() else None

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def called(self, peer: str) -> None:
        """Note that a call came over a connection.

        Args:
            peer: Its other end, as gRPC writes it.
        """
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        with contextlib.suppress(ValueError):  # a UNIX socket has no port
            end = (_plain(host), int(port))
            with self._lock:
                self._callers[end] = None
                self._callers.move_to_end(end)
                if len(self._callers) > _MAX_CALLERS:
                    self._callers.popitem(last=False)

    def look(self) -> int:
        """Count connections by address and hang up on what is too much; returns how many that were."""
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
                log.info("%s has %d connections; hung up on %d of them", address, len(found), closed)
                ended += closed
        self.hung_up += ended
        return ended

    def _watch(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self.look()
            except OSError as error:  # no files left, say: the next look may do better
                log.warning("looking at the connections failed: %s", error)
            pause = max(_PAUSE_SECONDS, (time.monotonic() - began) / _LARGEST_SHARE)

    def _connections(self) -> list[tuple[int, tuple[str, int]]]:
        """File number and other end of every connection to the hub's port."""
        found = []
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                if not os.readlink(_FILES / name).startswith("socket:"):
                    continue
            with contextlib.suppress(OSError), _borrowed(int(name)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and (
                    connection.getsockname()[1] == self._port
                ):
                    host, port = connection.getpeername()[:2]  # OSError for anything that is not connected
                    found.append((int(name), (_plain(host), port)))
        return found


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket of this process, under the number that it has. It is never copied and never closed here.

    Closing any handle of a file drops all POSIX locks that this process has on it. One of SQLite's files, copied and
    closed, would cost the hub its locks: the next command to read the database would take itself for the only one, and
    delete the log with what the hub has acknowledged.

    Raises:
        OSError: For a file that is not a socket, or is closed by now.
    """
    connection = socket.socket(fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _hang_up(number: int, end: tuple[str, int]) -> bool:
    """End a connection if the file still is that connection; gRPC sees its end and closes the file."""
    try:
        with _borrowed(number) as connection:
            host, port = connection.getpeername()[:2]
            if (_plain(host), port) != end:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # it has gone meanwhile


def _plain(host: str) -> str:
    """An address as it is compared: IPv4 as IPv4, without brackets and scope."""
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:")
