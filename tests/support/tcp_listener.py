"""A TCP server on a free loopback port that hands each connection to its subclass."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from typing import Any, Self


class TcpListener(ABC):
    """Accepts connections until it is closed; a context manager.

    Attributes:
        address: ``127.0.0.1:port``.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.close()

    @abstractmethod
    def connected(self, stream: socket.socket) -> None:
        """Take over a connection without waiting for it."""

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.connected(stream)
