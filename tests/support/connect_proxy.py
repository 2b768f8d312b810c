"""An HTTP proxy that tunnels TCP (CONNECT), with a table of names in place of DNS."""

from __future__ import annotations

import socket
import threading

from tests.support.tcp_listener import TcpListener
from tests.support.wait import SECONDS


class ConnectProxy(TcpListener):
    """Listens while open. ``hosts`` says which port of this machine a name stands for; ``seen`` is what was requested.

    Args:
        hosts: Port on loopback by ``host:port``.
        refuse: Status line for everything, such as ``403 Forbidden``.
    """

    def __init__(self, hosts: dict[str, int], refuse: str = "") -> None:
        self.hosts, self.refuse = hosts, refuse
        self.seen: list[str] = []
        self.headers: list[str] = []
        super().__init__()

    def connected(self, stream: socket.socket) -> None:
        """Tunnel in a thread of its own."""
        threading.Thread(target=self._tunnel, args=(stream,), daemon=True).start()

    def _tunnel(self, stream: socket.socket) -> None:
        with stream:
            request = b""
            while b"\r\n\r\n" not in request:
                request += stream.recv(4096)
            first, *headers = request.decode("latin-1").split("\r\n")
            target = first.split(" ")[1]
            self.seen.append(target)
            self.headers += headers
            if self.refuse or target not in self.hosts:
                stream.sendall(f"HTTP/1.1 {self.refuse or '502 Bad Gateway'}\r\n\r\n".encode())
                return
            with socket.create_connection(("127.0.0.1", self.hosts[target])) as hub:
                stream.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_copy, args=(hub, stream), daemon=True)
                back.start()
                _copy(stream, hub)
                back.join(SECONDS)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return
