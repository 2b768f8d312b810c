"""A file of named keys that commands change and running servers reload."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock, lockable_folder
from gym_fed.core.files import write_atomically
from gym_fed.core.portable import own_user
from gym_fed.core.text import counted

MAX_KEYS = 10_000
"""Maximum number of keys in a file, since every request is compared with all of them."""
MAX_FILE_BYTES = 16 * 2**20


class NamedKey(StrictModel):
    """The entry of a key, without the key itself."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")
    """The user's name."""

    created_at: int = Field(ge=0)
    """The creation time in Unix seconds."""


KeyT = TypeVar("KeyT", bound=NamedKey)


class KeysDocument(StrictModel, Generic[KeyT]):
    """The contents of the file; subclasses add ``format``."""

    version: Literal[1] = 1
    keys: tuple[KeyT, ...] = Field((), max_length=MAX_KEYS)


class KeyRing(Generic[KeyT]):
    """The keys of a JSON file with mode 0600, at most ``MAX_KEYS``; usable from any thread and process."""

    def __init__(self, path: Path, document: type[KeysDocument[KeyT]]) -> None:
        self.path = path
        self._document = document
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._keys: tuple[KeyT, ...] = ()

    def all(self) -> tuple[KeyT, ...]:
        """Read all keys from the file; empty if there is no file.

        Raises:
            GymError: ``STATE_CORRUPT``, also for more than ``MAX_KEYS`` keys or ``MAX_FILE_BYTES`` bytes;
                ``PERMISSION_DENIED`` for a file that others may write to.
        """
        with self._lock:
            try:
                status = self.path.stat()
                seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
                if seen != self._seen:
                    self._require_safe(status)
                    self._keys, self._seen = self._read(), seen
            except FileNotFoundError:
                self._keys, self._seen = (), None
            except OSError as error:
                self._seen = None
                raise GymError(
                    ErrorCode.PERMISSION_DENIED,
                    f"{self.path}: {error.strerror}",
                    "use a file that this user can read",
                ) from error
            return self._keys

    def remove(self, name: str) -> None:
        """Remove a key; running servers refuse it from the next request on.

        Raises:
            GymError: ``NOT_FOUND``; errors from ``all``.
        """
        with self._changing() as known:
            remaining = tuple(key for key in known if key.name != name)
            if len(remaining) == len(known):
                raise GymError(
                    ErrorCode.NOT_FOUND,
                    f"{self.path} has no key {name!r}",
                    "to see the names, use `list` instead of `remove`",
                )
            self._write(remaining)

    def _add(self, key: KeyT) -> None:
        """Add a key, and create the file if there is none.

        Raises:
            GymError: ``FILE_EXISTS`` for a name that already has a key; ``TOO_LARGE`` for a file that could not be read
                again; errors from ``all``.
        """
        with self._changing() as known:
            if any(other.name == key.name for other in known):
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"{self.path} already has a key {key.name!r}",
                    f"remove it first, with `remove {key.name}` instead of `add`",
                )
            if len(known) >= MAX_KEYS:
                raise self._too_large(f"has {MAX_KEYS:,} keys, which is the maximum")
            self._write((*known, key))

    @contextmanager
    def _changing(self) -> Iterator[tuple[KeyT, ...]]:
        """Yield the current keys, with the file locked against changes by other processes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lockable_folder(self.path.parent, follow=True) as folder:
            with suppress(OSError):  # the file system has no locks
                lock(folder, wait=True)
            yield KeyRing.all(self)

    def _write(self, keys: tuple[KeyT, ...]) -> None:
        data = f"{self._document(keys=keys).model_dump_json(indent=2)}\n".encode()
        if len(data) > MAX_FILE_BYTES:
            raise self._too_large(
                f"would have {counted(len(data), 'byte')}, but the maximum is {MAX_FILE_BYTES:,}"
            )
        write_atomically(self.path, data, mode=0o600)

    def _too_large(self, problem: str) -> GymError:
        return GymError(ErrorCode.TOO_LARGE, f"{self.path} {problem}", "remove keys that are no longer used")

    def _read(self) -> tuple[KeyT, ...]:
        with self.path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        problem = f"larger than {MAX_FILE_BYTES:,} bytes"
        if len(data) <= MAX_FILE_BYTES:
            try:
                return self._document.model_validate_json(data).keys
            except ValidationError as error:
                problem = first_problem(error, "file")
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{self.path}: {problem}",
            "restore the file, or remove it and add the keys again",
        )

    def _require_safe(self, status: os.stat_result) -> None:
        """Refuse a file that other users can write to, since they could add a key; not checked on Windows."""
        if own_user() is not None and status.st_mode & 0o022:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{self.path} may be written by others (mode {status.st_mode & 0o777:o})",
                f"chmod 600 {self.path}",
            )
