"""Authentication by API keys or, without keys, protection against requests from web pages of other sites.

A key is ``gym-`` and 32 random bytes. The key file contains the permissions and the SHA-256 of each key, which is
sufficient for random bytes; the key itself is shown only once. The file is reloaded when it changes, so that keys can
be added and revoked while a server runs.

Without keys the server listens on loopback, and any program on this machine may use it. In a browser, pages of other
sites could do so too. Such a page can post a form or run a script against 127.0.0.1, which ``Origin`` reveals, or let
its own name resolve to 127.0.0.1 (DNS rebinding), which ``Host`` reveals. Both are refused. With keys, neither is
harmful, because the page has no key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import first_problem
from gym_fed.core.addresses import is_loopback
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.key_ring import KeyRing, KeysDocument, NamedKey
from gym_fed.serving.openai.catalogue import LOCAL, Caller
from gym_fed.trust.identity.variant import Sha256, VariantName

_log = logging.getLogger(__name__)


class Authenticator:
    """Authenticates callers.

    Args:
        keys: The key file; None accepts all programs on this machine.
        origins: Origins on other hosts whose web pages may call the API without keys.
    """

    def __init__(self, keys: KeyFile | None, origins: Iterable[str] = ()) -> None:
        self._keys, self._origins = keys, frozenset(origins)
        self._trouble = ""  # the last logged problem of the key file

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Authenticate a request.

        Args:
            headers: The headers of the request, with names in lower case.

        Raises:
            GymError: ``UNAUTHENTICATED`` for a missing or wrong key; ``PERMISSION_DENIED`` for a page of another site;
                ``UNAVAILABLE`` if the key file cannot be used.
        """
        if self._keys is None:
            require_local(headers, self._origins)
            return LOCAL
        key = bearer_token(headers.get("authorization"))
        if key is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                "no API key was given",
                "send the header `Authorization: Bearer KEY` (the openai client's api_key)",
            )
        with self._file_errors_logged():
            caller = self._keys.caller(key)
        if caller is None:
            raise GymError(ErrorCode.UNAUTHENTICATED, "the API key is unknown or has expired")
        return caller

    def require_usable(self) -> None:
        """Check that keys can be read.

        Raises:
            GymError: ``UNAVAILABLE`` if the key file cannot be used.
        """
        if self._keys is not None:
            with self._file_errors_logged():
                self._keys.all()

    @contextmanager
    def _file_errors_logged(self) -> Iterator[None]:
        """Log once, for the operator, why the key file cannot be used; the caller gets a general error."""
        try:
            yield
        except GymError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("the API keys cannot be used: %s", error)
            raise GymError(
                ErrorCode.UNAVAILABLE, "the server cannot read its API keys", "see its log"
            ) from error
        self._trouble = ""


def require_local(headers: Mapping[str, str], origins: frozenset[str]) -> None:
    """Refuse a request to a host other than this machine, or from a page whose origin is not in ``origins``.

    Raises:
        GymError: ``PERMISSION_DENIED``.
    """
    host = headers.get("host", "")
    if not is_loopback(f"//{host}"):
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"without API keys, only requests to this machine are accepted, not to host {host!r}",
            "use http://127.0.0.1:PORT, or set api_keys",
        )
    origin = headers.get("origin")
    if origin is not None and origin not in origins and not is_loopback(origin):
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"pages from {origin!r} may not use this server without API keys",
            "open the page from this machine, or add its origin to cors_origins (gym api --cors-origin)",
        )


PREFIX = "gym-"
_OWNER = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$"


class ApiKey(NamedKey):
    """The entry of one key; its name is used in the usage log, and for fairness in the queue."""

    sha256: Sha256
    base: bool = True
    """True if the base itself may be used."""

    everything: bool = False
    """True if all variants may be used."""

    variants: tuple[VariantName, ...] = ()
    """The names of variants that may be used."""

    owners: tuple[Annotated[str, Field(pattern=_OWNER)], ...] = ()
    """Owners (accounts or user ids) whose variants may be used, including future ones."""

    metrics: bool = False
    """True if the server's metrics may be read."""

    manage_variants: bool = False
    """True if variants may be added and removed over HTTP."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per minute, of prompts and answers together."""

    expires_at: int | None = Field(default=None, ge=0)
    """Expiry time in Unix seconds; None if the key never expires."""

    @property
    def allows_anything(self) -> bool:
        """True if the key has any permission."""
        return bool(
            self.base
            or self.everything
            or self.variants
            or self.owners
            or self.metrics
            or self.manage_variants
        )

    def caller(self) -> Caller:
        variants, owners = frozenset(self.variants), frozenset(self.owners)
        return Caller(
            self.name,
            self.base,
            self.everything,
            variants,
            owners,
            self.metrics,
            self.manage_variants,
            self.requests_per_minute,
            self.tokens_per_minute,
            self.sha256,
        )


class _ApiKeysDocument(KeysDocument[ApiKey]):
    format: Literal["gym-api-keys"] = "gym-api-keys"


def hashed(key: str) -> str:
    """Return the SHA-256 of a key in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFile(KeyRing[ApiKey]):
    """The file of API keys, which must exist when a server uses it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _ApiKeysDocument)

    def caller(self, key: str) -> Caller | None:
        """Return the caller with this key; None for an unknown or expired one. Every key is compared.

        Raises:
            GymError: See ``all``.
        """
        match: ApiKey | None = None
        digest = hashed(key)
        for known in self.all():
            if hmac.compare_digest(known.sha256, digest):
                match = known
        if match is None or (match.expires_at is not None and match.expires_at <= time.time()):
            return None
        return match.caller()

    def all(self) -> tuple[ApiKey, ...]:
        """Read all keys from the file.

        Raises:
            GymError: ``FILE_NOT_FOUND``; errors from ``KeyRing.all``.
        """
        keys = super().all()
        if not keys and not self.path.exists():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"the API key file {self.path} does not exist",
                f"create one with: gym api keys add NAME --file {self.path}",
            )
        return keys

    def add(
        self,
        name: str,
        *,
        base: bool = True,
        everything: bool = False,
        variants: tuple[str, ...] = (),
        owners: tuple[str, ...] = (),
        metrics: bool = False,
        manage_variants: bool = False,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        expires_at: int | None = None,
    ) -> str:
        """Create a key, and the file if there is none.

        Returns:
            The key, which is not stored anywhere.

        Raises:
            GymError: ``FILE_EXISTS`` for a name that already has a key; ``USAGE`` for invalid values or no permissions.
        """
        if not (base or everything or variants or owners or metrics or manage_variants):
            raise GymError(
                ErrorCode.USAGE,
                f"key {name!r} would have no permissions",
                "pass --variant, --owner, --all-variants, --base, --metrics or --manage-variants",
            )
        key = PREFIX + secrets.token_urlsafe(32)
        try:
            entry = ApiKey(
                name=name,
                sha256=hashed(key),
                base=base,
                everything=everything,
                variants=tuple(dict.fromkeys(variants)),
                owners=tuple(dict.fromkeys(owners)),
                metrics=metrics,
                manage_variants=manage_variants,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                created_at=int(time.time()),
                expires_at=expires_at,
            )
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"API key: {first_problem(error)}") from error
        self._add(entry)
        return key

    def forget_variant(self, name: str) -> tuple[list[str], list[str]]:
        """Remove a variant from all keys, and remove the keys that allow nothing else.

        Returns:
            Names of the removed keys, and of the changed keys, which have other permissions.

        Raises:
            GymError: See ``all``.
        """
        removed, changed, remaining = [], [], []
        with self._changing() as known:
            for key in known:
                if name not in key.variants:
                    remaining.append(key)
                    continue
                rest = key.model_copy(
                    update={"variants": tuple(other for other in key.variants if other != name)}
                )
                if rest.allows_anything:
                    changed.append(key.name)
                    remaining.append(rest)
                else:
                    removed.append(key.name)
            if removed or changed:
                self._write(tuple(remaining))
        return removed, changed


_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


def bearer_token(header: str | None) -> str | None:
    """Return the key in an ``Authorization`` header; None for any scheme but ``Bearer``."""
    match = _BEARER.fullmatch(header or "")
    return match[1] if match else None
