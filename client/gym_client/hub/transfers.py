"""Resumable uploads and downloads of objects, with bounded size and verified by SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gym_client.hub.traffic import TokenBucket
from gym_client.hub.transport import HubClient, transfer_seconds
from gym_client.seeding.policy import Kind
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, write_atomically
from gym_fed.core.hashed_file import HashedFile
from gym_fed.core.text import counted, readable_bytes
from gym_fed.trust.wire.limits import CHUNK_BYTES
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_SHA256 = re.compile(r"[0-9a-f]{64}")

CALL_BYTES = 64 * CHUNK_BYTES
"""Maximum number of bytes in one upload call, which bounds its deadline; the next call continues after them."""

SPARE_BYTES = 256 << 20
"""Bytes that must stay free on the disk after a large download."""
_LARGE_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Called with the completed and total bytes."""


class ObjectCache:
    """A folder of files that are named by their SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, sha256: str) -> Path:
        """Return the path of an object; the file may not exist.

        Raises:
            GymError: ``USAGE`` for a name that is not a SHA-256.
        """
        if not _SHA256.fullmatch(sha256):
            raise GymError(ErrorCode.USAGE, f"{sha256[:80]!r} is not a sha256")
        return self.folder / sha256

    def has(self, sha256: str, size_bytes: int) -> bool:
        """Return True if the object is complete."""
        path = self.path(sha256)
        return path.is_file() and path.stat().st_size == size_bytes

    def put(self, data: bytes) -> Path:
        """Store bytes in a file named by their SHA-256."""
        path = self.path(hashlib.sha256(data).hexdigest())
        if not self.has(path.name, len(data)):
            write_atomically(path, data)
        return path


def partial_file(target: Path) -> Path:
    """Return the path of an object's partial download."""
    return target.with_name(f"{target.name}.part")


def download(
    client: HubClient,
    cache: ObjectCache,
    sha256: str,
    size_bytes: int,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    count: Callable[[int], None] = lambda num_bytes: None,
    kind: Kind | None = None,
) -> Path:
    """Download an object unless it is in the cache. Call again to resume.

    Args:
        client: Client of the hub.
        cache: The cache, which also stores a partial download as ``<sha256>.part``.
        sha256: Digest and name of the object.
        size_bytes: Expected size; the download never exceeds it.
        progress: Called after each chunk.
        should_stop: Checked between chunks; True stops the download.
        count: Called with the number of bytes of each chunk from the hub.
        kind: Kind of a public object, which other contributors may also serve; None for any other object.

    Raises:
        GymError: ``DISK_FULL`` before a large download that would fill the disk; ``HASH_MISMATCH`` or ``TOO_LARGE`` for
            wrong data, which is deleted; ``UNAVAILABLE`` if the connection breaks, or ``INTERRUPTED``; the partial
            download is then kept.
    """
    target = cache.path(sha256)
    seeding = client.seeding if kind is not None else None
    if cache.has(sha256, size_bytes):
        if kind is not None and seeding is not None:
            seeding.add(target, sha256, kind)
        return target
    part = partial_file(target)
    part.with_suffix(".seed").unlink(missing_ok=True)  # left by a killed process
    if part.exists() and part.stat().st_size > size_bytes:
        part.unlink()
    _require_space(target.parent, size_bytes - (part.stat().st_size if part.exists() else 0))
    report = progress or (lambda done, total: None)
    came = (
        kind is not None
        and seeding is not None
        and not part.exists()
        and seeding.fetch(part, sha256, size_bytes, kind, report, should_stop)
    )
    if not came and kind is not None and client.mirrors is not None and not part.exists():
        came = client.mirrors.fetch(part, sha256, size_bytes, report, should_stop)
    if not came:
        _download_from_hub(client, sha256, size_bytes, part, report, should_stop, count)
    os.replace(part, target)
    fsync_folder(target.parent)
    if kind is not None and seeding is not None:
        seeding.add(target, sha256, kind)
    return target


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes >= _LARGE_BYTES and free < num_bytes + SPARE_BYTES:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"an object needs {readable_bytes(num_bytes)} more in {folder}, but only {readable_bytes(free)} are free, "
            f"of which {readable_bytes(SPARE_BYTES)} must stay free",
            "free some space, or use a home on another disk with --home",
        )


def _download_from_hub(
    client: HubClient,
    sha256: str,
    size_bytes: int,
    part: Path,
    report: Progress,
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> None:
    """Complete the file ``part`` from the hub, and verify it."""
    with part.open("a+b") as file, HashedFile(file) as written:
        done = part.stat().st_size
        while done < size_bytes:
            if should_stop():
                raise GymError(
                    ErrorCode.INTERRUPTED, f"the download was stopped at byte {done} of {size_bytes}"
                )
            before = done
            done = _receive(client, written, sha256, done, size_bytes, part, report, should_stop, count)
            if done == before:
                raise GymError(
                    ErrorCode.UNAVAILABLE,
                    f"{client.address} sent nothing of object {sha256} after byte {done}",
                )
        digest = written.finish()
    if digest != sha256:
        part.unlink()
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{client.address} sent an object with sha256 {digest} instead of {sha256}",
        )


def _receive(
    client: HubClient,
    written: HashedFile,
    sha256: str,
    done: int,
    size: int,
    part: Path,
    report: Progress,
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> int:
    request = pb.DownloadRequest(sha256=sha256, offset=done)
    seconds = transfer_seconds(size - done) + client.rates.down.seconds(size - done)
    call = client.stream("Download", request, seconds)
    try:
        with client.errors():
            for index, chunk in enumerate(call):
                if index == 0 and chunk.size_bytes != size:
                    raise _too_large(
                        client, part, f"{counted(chunk.size_bytes, 'byte')} instead of {size}", sha256
                    )
                data = chunk.data  # every access to the attribute copies the bytes
                if done + len(data) > size:
                    raise _too_large(client, part, f"more than {counted(size, 'byte')}", sha256)
                written.write(data)
                done += len(data)
                count(len(data))
                report(done, size)
                client.rates.down.take(len(data), should_stop)
                if should_stop():
                    break
    finally:
        call.cancel()
    return done


def _too_large(client: HubClient, part: Path, problem: str, sha256: str) -> GymError:
    part.unlink(missing_ok=True)
    return GymError(ErrorCode.TOO_LARGE, f"{client.address} sent {problem} for object {sha256}")


def upload(
    client: HubClient,
    sha256: str,
    path: Path,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    count: Callable[[int], None] = lambda num_bytes: None,
    committed: Callable[[str], None] = lambda statement: None,
) -> None:
    """Upload a file to the hub. Call again to resume.

    Args:
        client: Client of the hub.
        sha256: Hex digest of the file, which is its name on the hub.
        path: Path of the file.
        progress: Called after each chunk that is passed to the network.
        should_stop: Checked between chunks; True stops the upload.
        count: Called with the number of bytes of each chunk that is passed to the network.
        committed: Called with the hub's signed commitment before the first byte is sent; the commitment is empty if the
            hub makes none.

    Raises:
        GymError: ``INTERRUPTED``; ``UNAVAILABLE`` if the connection breaks; errors from the hub.
    """
    size = path.stat().st_size
    report = progress or (lambda done, total: None)
    state = client.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=size))
    committed(state.commitment_json)
    while not state.complete:
        offset = state.offset
        if offset >= size:
            raise GymError(
                ErrorCode.INTERNAL,
                f"{client.address} requested byte {offset} of an object of {counted(size, 'byte')}",
            )
        report(offset, size)
        span = min(client.rates.up.span(CALL_BYTES), size - offset)

        def chunks(offset: int = offset, span: int = span) -> Iterator[pb.UploadChunk]:
            return _chunks(
                sha256,
                path,
                offset,
                span,
                client.rates.up,
                lambda done: report(done, size),
                should_stop,
                count,
            )

        if should_stop():
            raise GymError(ErrorCode.INTERRUPTED, f"the upload was stopped at byte {offset} of {size}")
        state = client.call("Upload", chunks, transfer_seconds(span))
        if not state.complete and state.offset <= offset:
            raise GymError(
                ErrorCode.INTERNAL,
                f"{client.address} accepted none of {counted(span, 'byte')} of object {sha256} at {offset}",
            )
    report(size, size)


def _chunks(
    sha256: str,
    path: Path,
    offset: int,
    span: int,
    rate: TokenBucket,
    report: Callable[[int], None],
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> Iterator[pb.UploadChunk]:
    with path.open("rb") as file:
        file.seek(offset)
        end, name = offset + span, sha256
        while offset < end:
            data = file.read(min(rate.chunk(CHUNK_BYTES), end - offset))
            if not data:
                return  # the file has shrunk; the hub's SHA-256 check refuses the object
            yield pb.UploadChunk(sha256=name, offset=offset, data=data)
            offset, name = offset + len(data), ""
            report(offset)
            count(len(data))
            rate.take(len(data), should_stop)
            if should_stop():
                return
