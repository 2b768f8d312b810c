"""Remote object stores: S3 by obstore, or any other by fsspec, with local copies up to a bound.

Whatever comes from there is hashed before it is used. Temporary names are nobody else's, so that two fetches of one
object do not write into each other. Credentials come from the environment, and are in no message.
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
from gym_server.store.away import StoreAway

log = logging.getLogger("gym_server")

_RETRIES, _RETRY_SECONDS, _CALL_SECONDS = 5, 20, 300
_LOOKS, _FIRST_LOOK_SECONDS = 4, 0.1
"""How often an object that is known to be there is looked for: some stores show what was put only after a while."""
GRACE_SECONDS = 300.0
"""A copy that was requested this lately is not removed: it is opened in a moment."""
_LEFT_SECONDS = 3600.0
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN")


class RemoteObjects:
    """One URL's objects, and their copies on this machine.

    Args:
        url: ``s3://bucket/prefix``, or any URL of fsspec.
        copies: Local folder of the copies.
        max_copy_bytes: What the copies may have together; those that were not used for longest go first. What a merge
            has open at once is kept even beyond it.
    """

    def __init__(self, url: str, copies: Path, max_copy_bytes: int) -> None:
        self.shown = _without_password(url)
        self.fs, self.root = _file_system(url)
        self._copies = copies
        self._max_copy_bytes = max_copy_bytes
        now = time.time()
        for left in copies.glob("*.fetch"):  # of a process that was killed
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < now - _LEFT_SECONDS:
                    left.unlink()

    def has(self, path: str) -> bool:
        """Raises ``StoreAway`` when the store does not answer."""
        try:
            with self.mapped_errors():
                self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def copy(self, path: str, sha256: str) -> Path:
        """A local file with an object's bytes; an object that is known to be there is looked for more than once.

        Raises:
            FileNotFoundError: The store does not hold it.
            StoreAway: It does not answer, or gives other bytes than those that were put.
        """
        copy = self._copies / f"{sha256}.copy"
        with suppress(FileNotFoundError):
            os.utime(copy)  # the clock of what goes first
            return copy
        part = self._copies / f"{sha256}-{secrets.token_hex(8)}.fetch"
        try:
            found = _looked_for(lambda: self._fetch(path, part))
            if found != sha256:
                what = f"{self.shown}: object {sha256} came with other bytes, of sha256 {found}"
                raise StoreAway(GymError(ErrorCode.HASH_MISMATCH, what, "put it back from a backup"))
            os.replace(part, copy)
        finally:
            part.unlink(missing_ok=True)
        self.evict()
        return copy

    def put(self, part: Path, path: str, sha256: str) -> None:
        """Store a file whose sha256 was checked; it becomes the local copy.

        Raises:
            StoreAway: The store did not take it, or does not show it; the file is still there.
        """
        size = part.stat().st_size
        try:
            with self.mapped_errors():
                self.fs.put_file(str(part), path)
            shown = _looked_for(lambda: self._size(path))
        except FileNotFoundError:
            what = f"{self.shown} does not show what was put"
            raise StoreAway(GymError(ErrorCode.UNAVAILABLE, what, "is the bucket there?")) from None
        if shown != size:
            what = f"{self.shown}: object {sha256} was put with {size} bytes, and has {shown}"
            raise StoreAway(GymError(ErrorCode.HASH_MISMATCH, what, "look at the object store"))
        os.replace(part, self._copies / f"{sha256}.copy")
        self.evict()

    def evict(self) -> None:
        """Remove the copies that were not used for longest, until the others are within the bound."""
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
        """Failures of the store inside the block are raised as ``StoreAway``; that something is missing stays so."""
        try:
            yield
        except (FileNotFoundError, GymError, StoreAway):
            raise
        except Exception as error:  # noqa: BLE001 (each implementation has failures of its own)
            what = f"{self.shown}: {_first_line(error)}"
            hint = "look at the object store, and at the credentials in the environment"
            raise StoreAway(GymError(ErrorCode.UNAVAILABLE, what, hint)) from None

    def _fetch(self, path: str, part: Path) -> str:
        with self.mapped_errors():
            self.fs.info(path)  # obstore's file complains on stderr when there is none
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


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    if not url.startswith("s3://"):
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"storage.objects: {_without_password(url)} cannot be used: {_first_line(error)}",
                "name a folder, or s3://BUCKET/PREFIX",
            ) from None
        return fs, str(root)
    if "@" in urlsplit(url).netloc:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "storage.objects holds credentials",
            "take them out: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are read from the environment",
        )
    try:
        from obstore.fsspec import FsspecStore
    except ImportError:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"storage.objects: {url} needs obstore, which is not installed",
            "pip install 'gym-fed[s3]'",
        ) from None
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    make: Any = FsspecStore
    fs = make(
        "s3",
        config={"checksum_algorithm": "SHA256"},  # the store checks what arrives
        client_options={
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=_CALL_SECONDS),
        },
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        skip_instance_cache=True,
    )
    return fs, url.removeprefix("s3://").rstrip("/")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _first_line(error: BaseException) -> str:
    """What happened, without the request's answer (which may hold a key's name) and without any secret."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = re.sub(r"<.*", "", lines[0])[:300].rstrip(" :")
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return text


def _mapped_files() -> set[str]:
    """Files that this process has mapped or open. Elsewhere than on Linux none is known, and what is open stays
    readable after its name is gone."""
    found: set[str] = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found |= {parts[5].rstrip("\n") for line in maps if len(parts := line.split(maxsplit=5)) == 6}
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
