"""A TCP proxy between contributors and a hub that breaks connections: at chosen bytes, or at a chosen moment."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import suppress

from tests.support.tcp_listener import TcpListener

KINDS = ("reset", "truncate", "delay", "drop")
"""Close with RST; close in order in mid-message; carry each piece late; carry nothing more, and stay open a while."""
_PIECE = 4096
_DELAY_SECONDS = 0.05
_DROP_SECONDS = 5.0


class FaultyLine(TcpListener):
    """Listens while open.

    Args:
        port: The hub's, on loopback.
        faults: Number of first connections that fail; later ones are only broken by ``fail``.
        seed: Seed of the bytes after which connections fail.

    Attributes:
        failed: Kinds of the connections that have failed.
    """

    def __init__(self, port: int, faults: int = 0, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._port = port
        self._plan = [(KINDS[n % len(KINDS)], int(10 ** draw.uniform(2.5, 4.3))) for n in range(faults)]
        self.failed: list[str] = []
        self._connections: list[_Connection] = []
        super().__init__()

    def connected(self, stream: socket.socket) -> None:
        """Connect to the hub, with the next fault of the plan."""
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:  # the hub is being started again
            stream.close()
            return
        fault = self._plan.pop(0) if self._plan else ("", 0)
        self._connections.append(_Connection(self, stream, far, *fault))

    def fail(self, kind: str) -> None:
        """Break every connection in this way, as soon as it carries another byte."""
        for connection in self._connections:
            connection.fail(kind)


class _Connection:
    """Two threads carry bytes; the fault comes when both together have carried ``at`` bytes."""

    def __init__(self, line: FaultyLine, near: socket.socket, far: socket.socket, kind: str, at: int) -> None:
        self._line, self._ends, self._kind, self._left = line, (near, far), kind, at
        self._lock = threading.Lock()
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def fail(self, kind: str) -> None:
        with self._lock:
            self._kind, self._left = kind, 1

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(_PIECE):
                if self._kind and self._is_due(len(data)):
                    if self._kind == "truncate":
                        target.sendall(data[: len(data) // 2])
                    if self._kind != "delay":
                        break
                    time.sleep(_DELAY_SECONDS)
                target.sendall(data)
        except OSError:
            pass
        if self._kind == "drop" and self._left <= 0:
            time.sleep(_DROP_SECONDS)
        for end in self._ends:
            with suppress(OSError):  # the other thread was first
                if self._kind == "reset" and self._left <= 0:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the other thread, whose recv keeps the socket open
                    end.close()
                else:
                    end.shutdown(socket.SHUT_RDWR)

    def _is_due(self, count: int) -> bool:
        with self._lock:
            was, self._left = self._left, self._left - count
            if was > 0 >= self._left:
                self._line.failed.append(self._kind)
        return self._left <= 0
