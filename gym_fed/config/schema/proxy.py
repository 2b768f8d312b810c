"""Types of config values for reverse proxies, their path prefixes, and origins of web pages."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from gym_fed.core.text import plain

MAX_PREFIX_CHARS = 256
_PREFIX = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def path_prefix(text: str) -> str:
    """Return a URL path prefix such as ``/gym`` without its trailing slash; empty for the root.

    Raises:
        ValueError: For anything but segments of letters, digits, ``-``, ``_``, ``~`` and, not first, ``.``.
    """
    prefix = text.removesuffix("/")
    if prefix and (len(prefix) > MAX_PREFIX_CHARS or not _PREFIX.fullmatch(prefix)):
        raise ValueError(
            f"{plain(text, 80)!r} is not a path prefix: write it like /gym or /tools/gym, with letters, digits, "
            f"-, _, ~ and ., and at most {MAX_PREFIX_CHARS} characters"
        )
    return prefix


def proxy_network(text: str) -> str:
    """Return an IP address or network in its normal form.

    Raises:
        ValueError: For a name, ``*``, or a network that contains every address.
    """
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError as error:
        raise ValueError(
            f"{plain(text, 80)!r} is not an IP address or network; write 10.0.0.2 or 10.0.0.0/24"
        ) from error
    if network.prefixlen == 0:
        raise ValueError(f"{network} includes every address: anyone could forge a proxy's headers")
    return str(network)


def web_origin(text: str) -> str:
    """Return the origin of a web page, in lower case.

    Raises:
        ValueError: For ``*``, ``null``, and anything with a path.
    """
    if text == "*":
        raise ValueError(
            "* would let every web page use this server; name each origin: https://chat.example.org"
        )
    origin = text.lower()
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"{plain(text, 80)!r} is not an origin; write only scheme and host: https://chat.example.org"
        )
    return origin


RootPath = Annotated[str, AfterValidator(path_prefix)]
ProxyNetwork = Annotated[str, AfterValidator(proxy_network)]
WebOrigin = Annotated[str, AfterValidator(web_origin)]
