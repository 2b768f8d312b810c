"""Login keys for pages that other machines can reach, in ``web_keys.json``.

A key is ``gymweb-`` and 32 random bytes, displayed once. The file contains its scrypt hash (RFC 7914), a name and a
role. It is reloaded when it changes, so keys can be added and removed while the server runs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.problems import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically

KEYS_NAME = "web_keys.json"
MAX_FILE_BYTES = 2**20
MAX_KEYS = 200
_PREFIX = "gymweb-"
_RESERVED = ("token", "public")
"""Names of visitors without a key."""
_LOGINS_PER_MINUTE = 30
"""Logins per key and minute, since each costs scrypt's 16 MB; the limit of one key does not affect others."""


class WebKey(StrictModel):
    """A key's record, without the key itself."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")
    role: Literal["viewer", "operator"]
    key_id: str = Field(pattern=r"^[0-9a-f]{8}$")
    """The first characters of the key, which select the record, so that each login needs a single hash."""

    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    scrypt: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: int = Field(ge=0)
    """Unix seconds."""


class _Document(StrictModel):
    format: Literal["gym-web-keys"] = "gym-web-keys"
    version: Literal[1] = 1
    keys: tuple[WebKey, ...] = Field(default=(), max_length=MAX_KEYS)


class WebKeys:
    """A file of keys. Thread-safe.

    Args:
        path: Path of the JSON file, mode 0600.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._attempts: dict[str, list[float]] = {}
        self._seen: tuple[int, ...] = ()
        self._keys: tuple[WebKey, ...] = ()

    def all(self) -> tuple[WebKey, ...]:
        """Return all keys; none if there is no file.

        Raises:
            GymError: ``STATE_CORRUPT``.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return ()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            if status.st_size > MAX_FILE_BYTES:
                raise GymError(ErrorCode.STATE_CORRUPT, f"{self.path}: is larger than {MAX_FILE_BYTES} bytes")
            try:
                self._keys = _Document.model_validate_json(self.path.read_bytes()).keys
            except ValidationError as error:
                raise GymError(ErrorCode.STATE_CORRUPT, f"{self.path}: {first_problem(error)}") from error
            self._seen = seen
        return self._keys

    def add(self, name: str, role: str) -> str:
        """Create a key.

        Returns:
            The key, which is not stored.

        Raises:
            GymError: ``USAGE`` for a name that is taken or invalid; ``STATE_CORRUPT``.
        """
        known = self.all()
        if name in _RESERVED or any(key.name == name for key in known):
            raise GymError(ErrorCode.USAGE, f"{self.path}: there is a key {name}", "choose another name")
        if len(known) >= MAX_KEYS:
            raise GymError(ErrorCode.USAGE, f"{self.path}: holds {MAX_KEYS} keys", "remove one first")
        secret = _PREFIX + secrets.token_hex(32)
        salt = secrets.token_bytes(16)
        try:
            made = WebKey(
                name=name,
                role=role,
                key_id=_key_id(secret),
                salt=salt.hex(),
                scrypt=_scrypt(secret, salt),
                created_at=int(time.time()),
            )
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"key {name!r}: {first_problem(error)}") from error
        self._write((*known, made))
        return secret

    def remove(self, name: str) -> None:
        """Remove a key and its sessions.

        Raises:
            GymError: ``NOT_FOUND``, ``STATE_CORRUPT``.
        """
        known = self.all()
        if all(key.name != name for key in known):
            raise GymError(ErrorCode.NOT_FOUND, f"{self.path}: there is no key {name}")
        self._write(tuple(key for key in known if key.name != name))

    def find(self, secret: str) -> WebKey | None:
        """Return the record of a key; None if unknown.

        Raises:
            GymError: ``BUSY`` after too many logins in a minute; ``STATE_CORRUPT``.
        """
        key_id = _key_id(secret)
        with self._lock:  # hash one key at a time
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

    def _write(self, keys: tuple[WebKey, ...]) -> None:
        document = _Document(keys=keys).model_dump()
        write_atomically(self.path, json.dumps(document, indent=1).encode(), 0o600)


def _key_id(secret: str) -> str:
    return secret.removeprefix(_PREFIX)[:8] if secret.startswith(_PREFIX) else ""


def _scrypt(secret: str, salt: bytes) -> str:
    return hashlib.scrypt(
        secret.encode("utf-8", "surrogateescape"), salt=salt, n=2**14, r=8, p=1, dklen=32
    ).hex()
