"""Remote object stores (S3 with obstore, others with fsspec) with a bounded cache of local copies.

Downloaded bytes are hashed before they are used. Temporary names are unique, so that two downloads of one object do not
write to the same file. Credentials come from the environment, and never appear in messages.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import fsspec

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import copy_hashed
from gym_fed.core.text import counted
from gym_server.store.unavailable import StoreUnavailable

log = logging.getLogger("gym_server")

_RETRIES, _RETRY_SECONDS, _CALL_SECONDS = 5, 20, 300
DELETE_SECONDS = 10.0
"""Time limit of one deletion, in seconds; it runs inside a write transaction, which blocks all other writers."""
_LOOKS, _FIRST_LOOK_SECONDS = 4, 0.1
"""Attempts to find an object that must exist, and the first delay; some stores are only eventually consistent."""
GRACE_SECONDS = 300.0
"""A copy requested within this many seconds is not removed, since it may not be open yet."""
_LEFT_SECONDS = 3600.0
_OBJECTS = "storage.objects"
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN")


class RemoteObjects:
    """The objects under one URL, and their copies on this machine.

    Args:
        url: ``s3://bucket/prefix``, or any fsspec URL.
        copies: Local folder of the copies.
        max_copy_bytes: Limit on the total size of the copies, in bytes; least recently used ones are removed first.
            Files that a merge has open are kept even beyond it.
    """

    def __init__(self, url: str, copies: Path, max_copy_bytes: int) -> None:
        self.shown = _without_password(url)
        self.fs, self.root = file_system(url, _OBJECTS)
        self._deleting, _ = file_system(url, _OBJECTS, DELETE_SECONDS, retries=0)
        self._copies = copies
        self._max_copy_bytes = max_copy_bytes
        now = time.time()
        for left in copies.glob("*.fetch"):  # left by a killed process
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < now - _LEFT_SECONDS:
                    left.unlink()

    def has(self, path: str) -> bool:
        """Return True if the store has the object; raise ``StoreUnavailable`` if the store does not answer."""
        try:
            with self.mapped_errors():
                self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def copy(self, path: str, sha256: str) -> Path:
        """Return a local copy of an object that must exist, retrying if it is not found.

        Raises:
            FileNotFoundError: If the store does not have it.
            StoreUnavailable: If the store does not answer, or returns bytes other than those stored.
        """
        copy = self._copies / f"{sha256}.copy"
        with suppress(FileNotFoundError):
            os.utime(copy)  # marks it as recently used
            return copy
        part = self._copies / f"{sha256}-{secrets.token_hex(8)}.fetch"
        try:
            found = _looked_for(lambda: self._fetch(path, part))
            if found != sha256:
                what = f"{self.shown}: object {sha256} has different bytes, with sha256 {found}"
                raise StoreUnavailable(GymError(ErrorCode.HASH_MISMATCH, what, "restore it from a backup"))
            os.replace(part, copy)
        finally:
            part.unlink(missing_ok=True)
        self.evict()
        return copy

    def put(self, part: Path, path: str, sha256: str) -> None:
        """Store a file whose sha256 was verified; the file becomes the local copy.

        Raises:
            StoreUnavailable: If the store does not accept the file or does not list it afterwards; the file is kept.
        """
        size = part.stat().st_size
        try:
            with self.mapped_errors():
                self.fs.put_file(str(part), path)
            shown = _looked_for(lambda: self._size(path))
        except FileNotFoundError:
            what = f"{self.shown} does not list an object that was just stored"
            raise StoreUnavailable(
                GymError(ErrorCode.UNAVAILABLE, what, "check that the bucket exists")
            ) from None
        if shown != size:
            what = f"{self.shown}: object {sha256} was stored with {counted(size, 'byte')}, but has {shown}"
            raise StoreUnavailable(GymError(ErrorCode.HASH_MISMATCH, what, "check the object store"))
        os.replace(part, self._copies / f"{sha256}.copy")
        self.evict()

    def delete(self, path: str) -> None:
        """Delete an object; raise ``StoreUnavailable`` if the store does not answer in time."""
        with self.mapped_errors():
            self._deleting.rm_file(path)

    def evict(self) -> None:
        """Remove the least recently used copies until the remaining ones are within the limit."""
        found = []
        for copy in self._copies.glob("*.copy"):
            with suppress(FileNotFoundError):
                status = copy.stat()
                found.append((status.st_mtime, status.st_size, copy))
        total = sum(size for _, size, _ in found)
        if total <= self._max_copy_bytes:
            return
        mapped, now = _mapped_files(), time.time()
        for used, size, copy in sorted(found):
            if total <= self._max_copy_bytes or used > now - GRACE_SECONDS:
                return
            if str(copy) not in mapped:
                copy.unlink(missing_ok=True)
                total -= size

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Convert errors of the store inside the block to ``StoreUnavailable``, except for missing files."""
        try:
            yield
        except (FileNotFoundError, GymError, StoreUnavailable):
            raise
        except Exception as error:  # noqa: BLE001 (each implementation raises its own exceptions)
            what = f"{self.shown}: {_first_line(error)}"
            hint = "check the object store, and the credentials in the environment"
            raise StoreUnavailable(GymError(ErrorCode.UNAVAILABLE, what, hint)) from None

    def _fetch(self, path: str, part: Path) -> str:
        with self.mapped_errors():
            self.fs.info(path)  # raises before obstore does, which prints to stderr if a file is missing
        with self.mapped_errors(), self.fs.open(path, "rb") as source, open(part, "wb") as file:
            sha256, _ = copy_hashed(source, file)
            file.flush()
            os.fsync(file.fileno())
        return sha256

    def _size(self, path: str) -> int:
        with self.mapped_errors():
            self.fs.invalidate_cache()
            return int(self.fs.info(path)["size"])


def _looked_for(look: Any) -> Any:
    for attempt in range(_LOOKS - 1):
        with suppress(FileNotFoundError):
            return look()
        time.sleep(_FIRST_LOOK_SECONDS * 2**attempt)
    return look()


def file_system(
    url: str, option: str, call_seconds: float = _CALL_SECONDS, retries: int = _RETRIES
) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; the limits apply only to S3.

    Raises:
        GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY``, naming the ``option`` that contains the URL.
    """
    if not url.startswith("s3://"):
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{option}: {_without_password(url)} cannot be used: {_first_line(error)}",
                "use a folder, or s3://BUCKET/PREFIX",
            ) from None
        return fs, str(root)
    if "@" in urlsplit(url).netloc:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{option} contains credentials",
            "remove them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are read from the environment",
        )
    try:
        from obstore.fsspec import FsspecStore
    except ImportError:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{option}: {url} needs obstore, which is not installed",
            "pip install 'gym-fed[s3]'",
        ) from None
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    make: Any = FsspecStore
    fs = make(
        "s3",
        config={"checksum_algorithm": "SHA256"},  # the store verifies uploads
        client_options={
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=min(10, call_seconds)),
            "timeout": timedelta(seconds=call_seconds),
        },
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        skip_instance_cache=True,
    )
    return fs, url.removeprefix("s3://").rstrip("/")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _first_line(error: BaseException) -> str:
    """Return the error's first line, without secrets and without the response, which may contain a key's name."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = re.sub(r"<.*", "", lines[0])[:300].rstrip(" :")
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return text


def _mapped_files() -> set[str]:
    """Return the files that this process has mapped or open; empty on systems other than Linux."""
    found: set[str] = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found |= {parts[5].rstrip("\n") for line in maps if len(parts := line.split(maxsplit=5)) == 6}
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
