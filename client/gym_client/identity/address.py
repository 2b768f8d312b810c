"""Addresses of hubs: ``host``, ``host:port`` or ``[v6]:port``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain, whole_number
from gym_fed.trust.wire.limits import DEFAULT_PORT

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
"""Allowed characters in host names and IP addresses. Non-ASCII letters can look alike, and control characters can
manipulate a terminal."""


@dataclass(frozen=True)
class Address:
    """The address of a hub."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address; the default port is the hub's.

        Raises:
            GymError: ``USAGE`` with the invalid text.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or port.endswith("]") or (":" in host and not host.endswith("]")):
            host, port = text.strip(), str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not _HOST.fullmatch(host) or whole_number(port, 5) is None:
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(text, 300)!r} is not an address",
                "use host or host:port; write a non-ASCII name in its ASCII form (xn--...)",
            )
        if not 1 <= int(port) <= 65535:
            raise GymError(ErrorCode.USAGE, f"{text!r}: port {port} is not in 1 to 65535")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """True if the address always refers to this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def file_name(self) -> str:
        """The address in the form ``host_port``, which is a valid file name."""
        safe = "".join(c if c.isalnum() or c in ".-" else "-" for c in self.host.lower())
        return f"{safe}_{self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
