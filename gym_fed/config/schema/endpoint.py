"""The type of ``host:port`` values in configs."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from gym_fed.core.text import plain, whole_number

_EVERYWHERE = {"0.0.0.0", "[::]", "::", "*"}


class Endpoint(NamedTuple):
    """An address to listen on or to connect to."""

    host: str
    """Host name or address; IPv6 in brackets."""

    port: int

    @property
    def is_everywhere(self) -> bool:
        """True for the address of all interfaces, to which no one can connect."""
        return self.host in _EVERYWHERE

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect to it."""
        try:
            return ipaddress.ip_address(self.host.removeprefix("[").removesuffix("]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def parse(cls, text: str, least_port: int = 1) -> Endpoint:
        """Read ``host:port``.

        Raises:
            ValueError: If the text is invalid, with the reason for users.
        """
        host, colon, digits = text.rpartition(":")
        port = whole_number(digits, 5)
        if not colon or not host or port is None:
            raise ValueError(f"{plain(text, 80)!r} is not host:port")
        if not least_port <= port <= 65535:
            raise ValueError(f"port {port} is not between {least_port} and 65535")
        bare = host.removeprefix("[").removesuffix("]")
        if any(not c.isprintable() or c in " /@[]" for c in bare) or (":" in bare and host != f"[{bare}]"):
            raise ValueError(
                f"{plain(host, 80)!r} is not a host; an IPv6 address must be in brackets, such as [::1]"
            )
        return cls(host, port)
