"""Access control for web pages: login keys, roles, sessions, and checks of every request.

A session starts with the token in the printed URL (loopback), with a key of ``web_keys.json``, or, on a public site, as
an anonymous viewer. If the command opens a browser, it passes a token for one login in a file, which other users of the
machine cannot read; they could read a command line. The session's cookie is HttpOnly and SameSite=Strict. Changes
require the operator role and the session's CSRF token in the header ``X-CSRF-Token``.

A key is ``gymweb-`` and 32 random bytes, displayed once. The file contains its scrypt hash (RFC 7914), a name and a
role. The file is reloaded when it changes, so keys can be added and removed while the server runs.

``Origin`` is checked to block requests from pages of other sites, and ``Host`` to block DNS rebinding, where the name
of another site resolves to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError
from starlette.requests import HTTPConnection
from starlette.responses import Response

from gym_fed.config.schema.base import first_problem
from gym_fed.core.addresses import is_loopback
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.key_ring import KeyRing, KeysDocument, NamedKey
from gym_fed.serving.http.proxies import prefix_of

CSRF_HEADER = "x-csrf-token"
SESSION_SECONDS = 7 * 86_400
SINGLE_LOGIN_SECONDS = 60
"""Lifetime of a token for one login, long enough for a browser to start."""
MAX_SESSIONS = 1000
"""Maximum number of sessions; the oldest one is dropped first."""
MAX_SESSIONS_OF_KEY = 100
"""Maximum number of sessions per key, so that logins with one key cannot end the sessions of others."""


class Role(IntEnum):
    """The permissions of a visitor; a higher role includes those of the lower ones.

    ``METRICS`` is for monitoring: it reads all metrics of a hub, opens no page and starts no session.
    """

    METRICS = 0
    VIEWER = 1
    OPERATOR = 2


@dataclass(frozen=True)
class Visitor:
    """The sender of a request.

    Attributes:
        name: Name of the key; ``token`` for the token in the printed URL, ``public`` without a login.
        csrf: Token that changing requests must contain; empty for viewers.
        expires_at: Expiry time in Unix seconds.
        key_id: Id of the key, since its name may have been reassigned to another key.
    """

    name: str
    role: Role
    csrf: str = ""
    expires_at: float = field(default=0.0, repr=False)
    key_id: str = field(default="", repr=False)


TOKEN = "token"
"""The name of a visitor who used the printed URL; no key may have this name."""

PUBLIC = Visitor("public", Role.VIEWER)


KEYS_NAME = "web_keys.json"
_PREFIX = "gymweb-"
_LOGINS_PER_MINUTE = 30
"""Maximum number of logins per key and minute, since each needs 16 MB for scrypt. It is per key, so that no key locks
out others."""


class WebKey(NamedKey):
    """The record of a key, without the key itself."""

    role: Literal["metrics", "viewer", "operator"]
    key_id: str = Field(pattern=r"^[0-9a-f]{8}$")
    """The first characters of the key, by which the record is found, so that each login needs only one hash."""

    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    scrypt: str = Field(pattern=r"^[0-9a-f]{64}$")


class _WebKeysDocument(KeysDocument[WebKey]):
    format: Literal["gym-web-keys"] = "gym-web-keys"


class WebKeys(KeyRing[WebKey]):
    """The file of login keys.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _WebKeysDocument)
        self._hashing = threading.Lock()
        self._attempts: dict[str, list[float]] = {}

    def add(self, name: str, role: str) -> str:
        """Create a key.

        Returns:
            The key, which is not stored.

        Raises:
            GymError: ``FILE_EXISTS`` for a name that has a key; ``USAGE`` for an invalid name; errors from ``all``.
        """
        if name in (TOKEN, PUBLIC.name):
            raise GymError(ErrorCode.USAGE, f"the key name {name} is reserved", "choose another name")
        secret = _PREFIX + secrets.token_hex(32)
        salt = secrets.token_bytes(16)
        try:
            entry = WebKey(
                name=name,
                role=role,
                key_id=_key_id(secret),
                salt=salt.hex(),
                scrypt=_scrypt(secret, salt),
                created_at=int(time.time()),
            )
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"key {name!r}: {first_problem(error)}") from error
        self._add(entry)
        return secret

    def find(self, secret: str) -> WebKey | None:
        """Return the record of a key; None if unknown.

        Raises:
            GymError: ``BUSY`` after too many logins in a minute; ``STATE_CORRUPT``.
        """
        key_id = _key_id(secret)
        with self._hashing:  # check one key at a time
            record = next((key for key in self.all() if key_id and key.key_id == key_id), None)
            if record is None:
                return None
            now = time.monotonic()
            attempts = [at for at in self._attempts.get(key_id, ()) if at > now - 60]
            if len(attempts) >= _LOGINS_PER_MINUTE:
                raise GymError(ErrorCode.BUSY, "too many logins", "try again in a minute")
            self._attempts[key_id] = [*attempts, now]
            right = hmac.compare_digest(record.scrypt, _scrypt(secret, bytes.fromhex(record.salt)))
        return record if right else None


def _key_id(secret: str) -> str:
    return secret.removeprefix(_PREFIX)[:8] if secret.startswith(_PREFIX) else ""


def _scrypt(secret: str, salt: bytes) -> str:
    return hashlib.scrypt(
        secret.encode("utf-8", "surrogateescape"), salt=salt, n=2**14, r=8, p=1, dklen=32
    ).hex()


class Access:
    """Checks requests to one address.

    Args:
        cookie: Name of the cookie. It includes the port, since browsers send the cookies of a host to all its ports.
        token: Token in the printed URL; None if keys are required.
        keys: File of keys; None if there is none.
        public: True if everyone is a viewer.
    """

    def __init__(
        self,
        cookie: str,
        *,
        token: str | None,
        keys: WebKeys | None = None,
        public: bool = False,
    ) -> None:
        self.cookie, self.public = cookie, public
        self._token, self._keys = token, keys
        self._single: tuple[str, float, Callable[[], None]] | None = None
        self._sessions: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()

    def visitor(self, request: HTTPConnection) -> Visitor | None:
        """Return the sender of a request; None if unknown."""
        session = request.cookies.get(self.cookie, "")
        with self._lock:
            visitor = self._sessions.get(session)
            if visitor is not None and (visitor.expires_at <= time.time() or not self._is_known(visitor)):
                del self._sessions[session]
                visitor = None
        return visitor or (PUBLIC if self.public else None)

    def require(self, request: HTTPConnection, role: Role = Role.VIEWER) -> Visitor:
        """Return the visitor, who must have at least this role.

        Raises:
            GymError: ``UNAUTHENTICATED``, ``PERMISSION_DENIED``.
        """
        visitor = self.visitor(request)
        if visitor is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                "this page requires a login",
                "open the URL with the token that the command printed, or log in with a key",
            )
        if visitor.role < role:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{visitor.name} may view but not change anything",
                "log in with a key of role operator",
            )
        return visitor

    def require_change(self, request: HTTPConnection) -> Visitor:
        """Return the operator, whose request must come from a page of this server.

        Raises:
            GymError: ``UNAUTHENTICATED``, ``PERMISSION_DENIED``.
        """
        visitor = self.require(request, Role.OPERATOR)
        token = request.headers.get(CSRF_HEADER, "")
        if not visitor.csrf or not hmac.compare_digest(token.encode(), visitor.csrf.encode()):
            raise GymError(ErrorCode.PERMISSION_DENIED, "the request lacks its CSRF token", "reload the page")
        return visitor

    def require_place(self, request: HTTPConnection) -> None:
        """Reject a request for another host, or from a page of another site.

        Raises:
            GymError: ``PERMISSION_DENIED``.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._token is not None and not is_loopback(f"//{host}"):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"host {host!r} is not this machine, and without keys only this machine is served",
                "use http://127.0.0.1:PORT, or listen on another address with keys",
            )
        if origin is not None and _place(origin) != host.lower():
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"a page of {origin!r} may not use this server",
                "open the server's own page",
            )

    def login(self, secret: str) -> str:
        """Start a session with the token or a key.

        Returns:
            Value of the cookie.

        Raises:
            GymError: ``UNAUTHENTICATED`` for a wrong secret; ``PERMISSION_DENIED`` for a key that only reads metrics;
                ``BUSY`` after too many attempts.
        """
        known = Visitor(TOKEN, Role.OPERATOR) if self._takes_single(secret) else self._known(secret)
        if known.role is Role.METRICS:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"the key of {known.name} reads /metrics and opens no page",
                "log in with a key of role viewer or operator",
            )
        return self._begin(known)

    def single_login(self, used: Callable[[], None] = lambda: None) -> str:
        """Return a token for one login within a minute, replacing an earlier one; the login calls ``used``."""
        token = new_token()
        with self._lock:
            self._single = (token, time.monotonic() + SINGLE_LOGIN_SECONDS, used)
        return token

    def bearer(self, request: HTTPConnection) -> Visitor | None:
        """Return the sender of a request with the token or a key as ``Authorization: Bearer``; None without it.

        Programs have no session and may not make changes.

        Raises:
            GymError: ``UNAUTHENTICATED`` for a wrong secret; ``BUSY`` after too many attempts.
        """
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._known(secret.strip())

    def logout(self, request: HTTPConnection) -> None:
        """End the session of a request, if it has one."""
        with self._lock:
            self._sessions.pop(request.cookies.get(self.cookie, ""), None)

    def set_cookie(self, request: HTTPConnection, response: Response, session: str) -> None:
        """Set the session cookie for the path prefix of the request; with TLS, only for TLS."""
        response.set_cookie(
            self.cookie,
            session,
            max_age=SESSION_SECONDS,
            path=prefix_of(request.scope) or "/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )

    def _takes_single(self, secret: str) -> bool:
        """Return True for the token of ``single_login``, once and only before it expires."""
        with self._lock:
            if self._single is None or not hmac.compare_digest(secret.encode(), self._single[0].encode()):
                return False
            (_, expires_at, used), self._single = self._single, None
        used()
        return time.monotonic() < expires_at

    def _known(self, secret: str) -> Visitor:
        """Return the visitor for the token or a key, without a session."""
        if self._token is not None and hmac.compare_digest(secret.encode(), self._token.encode()):
            return Visitor(TOKEN, Role.OPERATOR)
        key = self._keys.find(secret) if self._keys is not None else None
        if key is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                "unknown token or key",
                "the token changes at every start: use the URL that the command printed last",
            )
        return Visitor(key.name, Role[key.role.upper()], key_id=key.key_id)

    def _is_known(self, visitor: Visitor) -> bool:
        """Return True if the key that started the session still exists and has the same role.

        Its name may have been reassigned to another key.
        """
        if visitor.name == TOKEN or self._keys is None:
            return True
        began = (visitor.name, visitor.key_id, visitor.role)
        return any((key.name, key.key_id, Role[key.role.upper()]) == began for key in self._keys.all())

    def _begin(self, known: Visitor) -> str:
        session = secrets.token_urlsafe(32)
        csrf = secrets.token_urlsafe(32) if known.role is Role.OPERATOR else ""
        with self._lock:
            own = [other for other, visitor in self._sessions.items() if visitor.name == known.name]
            if len(own) >= MAX_SESSIONS_OF_KEY:
                del self._sessions[own[0]]
            self._sessions[session] = replace(known, csrf=csrf, expires_at=time.time() + SESSION_SECONDS)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return session


def new_token() -> str:
    """Create a token for the printed URL."""
    return secrets.token_urlsafe(24)


def _place(origin: str) -> str:
    """Return host and port of an ``Origin`` header; empty for ``null`` and invalid values."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
