"""Download an offer into the Hugging Face cache: resumable, verified, and locked against other programs.

huggingface_hub discards partial files of killed downloads, so this module stores them as ``blobs/DIGEST.incomplete``.
They are renamed to ``blobs/DIGEST`` when the checksum matches, and the snapshot and ``refs/main`` are written after
all files, so that other programs find only complete snapshots in the cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gym_fed.base.downloads import hub
from gym_fed.base.downloads.offer import DownloadOffer, RepoFile
from gym_fed.base.downloads.requests import RETRY_SECONDS, answer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import full_disk_named, write_atomically
from gym_fed.core.text import counted, readable_bytes

Report = Callable[[int, int, str], None]
"""Called with the bytes on disk, the total bytes, and a note that is usually empty; from any thread, but never
concurrently."""

MAX_WORKERS = 4
ATTEMPTS = 2
"""Maximum number of downloads of a file whose bytes do not match the Hub's checksum."""
MAX_LOSSES = 5
"""Maximum number of consecutive lost connections without progress on a file."""
_SPARE_BYTES = 64 << 20


def silent(done: int, total: int, remark: str) -> None:
    """Discard the progress."""


def fetch(offer: DownloadOffer, report: Report = silent) -> Path:
    """Download the missing files and return the snapshot's folder.

    Raises:
        GymError: ``DISK_FULL`` before the download; ``HASH_MISMATCH`` for a file whose checksum differs from the
            Hub's; ``INTERRUPTED`` after Ctrl-C; the errors of ``hub_errors``. Partial files are kept.
    """
    store = offer.folder
    blobs = store / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    _require_space(offer, blobs)
    state = _State(offer, report)
    with _stopped_together(state) as pool, hub.hub_errors(offer.kind, offer.name), full_disk_named(blobs):
        running = [pool.submit(_fetch_file, offer, file, blobs, state) for file in offer.files]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error
    return _link(offer, store)


class _Cancelled(Exception):
    """Raised in a thread if another file failed, or Ctrl-C was pressed."""


class _State:
    """State shared by the threads: progress of each file, and the stop flag."""

    def __init__(self, offer: DownloadOffer, report: Report) -> None:
        self.stop = threading.Event()
        self._report, self._total = report, offer.total_bytes
        self._at: dict[str, int] = {}
        self._lock = threading.Lock()

    def at(self, file: RepoFile, position: int, remark: str = "") -> None:
        """Record that ``position`` bytes of ``file`` are on disk."""
        if self.stop.is_set():
            raise _Cancelled
        with self._lock:
            self._at[file.path] = position
            self._report(sum(self._at.values()), self._total, remark)

    @property
    def done(self) -> int:
        return sum(self._at.values())


@contextmanager
def _stopped_together(state: _State) -> Iterator[ThreadPoolExecutor]:
    """Stop all threads when one fails or Ctrl-C is pressed; partial files are kept."""
    pool = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="download")
    try:
        yield pool
    except KeyboardInterrupt as error:
        state.stop.set()
        raise GymError(
            ErrorCode.INTERRUPTED,
            f"the download was interrupted; {readable_bytes(state.done)} are on disk",
            "run the same command again to resume",
        ) from error
    finally:
        state.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _fetch_file(offer: DownloadOffer, file: RepoFile, blobs: Path, state: _State) -> None:
    """Download and verify ``blobs/DIGEST``, holding the lock that programs using this cache share."""
    blob, part = blobs / file.digest, blobs / f"{file.digest}.incomplete"
    with _lock(offer, file, state):
        if blob.is_file():
            if _digest(blob, file, state) == file.digest:
                state.at(file, file.size_bytes)
                return
            state.at(file, 0, f"{file.path} in the cache is damaged; fetching it again")
            blob.unlink()
        for _ in range(ATTEMPTS):
            _get(offer, file, part, state)
            if part.stat().st_size == file.size_bytes and _digest(part, file, state) == file.digest:
                part.replace(blob)
                state.at(file, file.size_bytes)
                return
            size = part.stat().st_size
            part.unlink()
            state.at(file, 0, f"{file.path} does not match the Hub's checksum; fetching it again")
    problem = (
        f"{counted(size, 'byte')} instead of {file.size_bytes:,}"
        if size != file.size_bytes
        else "a different checksum"
    )
    raise GymError(
        ErrorCode.HASH_MISMATCH,
        f"{file.path} of {offer.name}: {hub.endpoint()} sent {problem} {ATTEMPTS} times; the file was discarded",
        "a proxy may be changing or truncating files: try later, from another network, or with another HF_ENDPOINT",
    )


def _get(offer: DownloadOffer, file: RepoFile, part: Path, state: _State) -> None:
    """Append the missing bytes to ``part``, without verifying their checksum or number."""
    import httpx2
    from huggingface_hub import constants

    with part.open("ab") as stream:
        if (have := os.fstat(stream.fileno()).st_size) > file.size_bytes:
            stream.truncate(have := 0)
        if have == 0 and file.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{file.path} of {offer.name}: {readable_bytes(file.size_bytes)} exceed the limit for one file",
                f"fetch the model with: hf download {offer.name}",
            )
        most, losses = have, 0
        try:
            while have < file.size_bytes:
                state.at(file, have)
                try:
                    _append(offer, file, stream, have, state)
                    return
                except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError):
                    have = stream.seek(0, os.SEEK_END)
                    losses = 0 if have > most else losses + 1
                    most = max(have, most)
                    if losses > MAX_LOSSES:
                        raise
                    state.stop.wait(RETRY_SECONDS)
        finally:
            stream.flush()
            os.fsync(stream.fileno())


def _append(offer: DownloadOffer, file: RepoFile, stream: BinaryIO, have: int, state: _State) -> None:
    """Write a response; restart the file if the server does not support ranges."""
    from huggingface_hub import constants

    url = hub.file_url(offer.kind, offer.name, offer.commit, file.path)
    with answer(url, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, start=have) as response:
        if have and response.status_code != 206:
            stream.seek(0)
            stream.truncate(have := 0)
        for data in response.iter_raw():
            stream.write(data)
            have += len(data)
            if have > file.size_bytes:
                return  # the caller reports the wrong size
            state.at(file, have)


def _digest(path: Path, file: RepoFile, state: _State) -> str:
    """Hash a file like the Hub: sha256, or git's sha1 of a blob."""
    size = path.stat().st_size
    digest = hashlib.sha256() if file.sha256 is not None else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as stream:
        while data := stream.read(8 << 20):
            digest.update(data)
            if state.stop.is_set():
                raise _Cancelled
    return digest.hexdigest()


@contextmanager
def _lock(offer: DownloadOffer, file: RepoFile, state: _State) -> Iterator[None]:
    """Hold the lock that huggingface_hub uses for downloads of a file."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported lazily

    store = offer.folder
    folder = store.parent / ".locks" / store.name
    folder.mkdir(parents=True, exist_ok=True)
    waited = False
    while True:
        try:
            with WeakFileLock(folder / f"{file.digest}.lock", timeout=1):
                yield
                return
        except Timeout:
            state.at(file, 0, "" if waited else f"waiting for another process that is fetching {file.path}")
            waited = True


def _require_space(offer: DownloadOffer, folder: Path) -> None:
    parts = sum(p.stat().st_size for p in folder.glob("*.incomplete"))
    missing = max(0, offer.missing_bytes - parts)
    free = shutil.disk_usage(folder).free
    if missing + _SPARE_BYTES > free:
        hint = "free some space there (`hf cache ls` shows what it holds), or set HF_HOME to a folder on another disk"
        raise GymError(
            ErrorCode.DISK_FULL,
            f"{offer.name}: {readable_bytes(missing)} must be fetched, but {folder} has room for "
            f"{readable_bytes(free)}",
            hint
            if offer.store is None
            else "free some space there, or set GYM_HOME to a folder on another disk",
        )


def _link(offer: DownloadOffer, store: Path) -> Path:
    """Link the snapshot's files to the blobs, then write ``refs/main``, in the layout of the shared cache."""
    snapshot = store / "snapshots" / offer.commit
    for file in offer.files:
        link, blob = snapshot / file.path, store / "blobs" / file.digest
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_file() and link.samefile(blob):
            continue
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:  # copy on file systems without links, like huggingface_hub
            shutil.copyfile(blob, link)
    (store / "refs").mkdir(exist_ok=True)
    write_atomically(store / "refs" / "main", offer.commit.encode())
    return snapshot
