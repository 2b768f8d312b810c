"""Who is let in: the API key of a request, or on a machine without keys, that it comes from no web page elsewhere.

Without keys the server listens on loopback, and any program of this machine may use it. A browser would let pages of
other sites do so too: by a form or script that posts to 127.0.0.1 (told by ``Origin``), or under a name of the site's
own that its DNS has turned to 127.0.0.1 (DNS rebinding, told by ``Host``). Both are refused. With keys neither can
do harm, for the page has no key.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.api.keys import KeyFile, bearer_token
from gym_fed.serving.openai.catalogue import LOCAL, Caller

_log = logging.getLogger(__name__)


class Gate:
    """Tells who asks.

    Args:
        keys: The file of keys; None lets everyone on this machine in.
    """

    def __init__(self, keys: KeyFile | None) -> None:
        self._keys = keys
        self._trouble = ""  # with the file of keys, as it was logged

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who asks.

        Args:
            headers: Of the request, names in lower case.

        Raises:
            GymError: ``UNAUTHENTICATED`` for a missing or wrong key; ``PERMISSION_DENIED`` for a page of elsewhere;
                ``UNAVAILABLE`` where the file of keys cannot be used.
        """
        if self._keys is None:
            require_local(headers)
            return LOCAL
        key = bearer_token(headers.get("authorization"))
        if key is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                "no API key was given",
                "send the header `Authorization: Bearer KEY` (the openai client's api_key)",
            )
        with self._trouble_of_ours():
            caller = self._keys.caller(key)
        if caller is None:
            raise GymError(ErrorCode.UNAUTHENTICATED, "the API key is unknown here, or has expired")
        return caller

    def require_usable(self) -> None:
        """Raises:
        GymError: ``UNAVAILABLE`` where the file of keys cannot be used.
        """
        if self._keys is not None:
            with self._trouble_of_ours():
                self._keys.keys()

    @contextmanager
    def _trouble_of_ours(self) -> Iterator[None]:
        """The file of keys is the operator's business: the log says, once, why it cannot be used."""
        try:
            yield
        except GymError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("the API keys cannot be used: %s", error)
            raise GymError(
                ErrorCode.UNAVAILABLE, "the server cannot read its API keys", "its log tells why"
            ) from error
        self._trouble = ""


def require_local(headers: Mapping[str, str]) -> None:
    """Refuse a request that names another host than this machine, or comes from a page that does.

    Raises:
        GymError: ``PERMISSION_DENIED``.
    """
    host = headers.get("host", "")
    if not _is_loopback(f"//{host}"):
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"host {host!r} is not this machine, and without API keys only this machine is served",
            "use http://127.0.0.1:PORT, or set api_keys",
        )
    origin = headers.get("origin")
    if origin is not None and not _is_loopback(origin):
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"a page of {origin!r} may not use this server, which has no API keys",
            "open the page from this machine, or set api_keys",
        )


def _is_loopback(url: str) -> bool:
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
