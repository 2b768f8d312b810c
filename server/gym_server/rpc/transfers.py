"""Uploads and downloads: uploads are declared first, resumable by offset, and acknowledged once on disk.

Memory holds one chunk per upload and two per download. An upload never exceeds its declared size, and a declared size
never exceeds the limits.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import ColumnElement, Connection, func, select, update

from gym_fed.config.hub.sections import LimitsConfig, StorageConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted, readable_seconds
from gym_fed.trust.wire.limits import CHUNK_BYTES
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.observe.instruments import UPLOAD_BYTES
from gym_server.rpc.threads import heavily
from gym_server.store.database import Database, insert_if_absent, rerun
from gym_server.store.objects import ObjectStore
from gym_server.store.rights import may_read, usage_of
from gym_server.store.tables import objects, readers, uploads

SYNC_BYTES = 16 << 20
MAX_OPEN_UPLOADS = 4
_SMALL_CHUNK_BYTES = 64 << 10
_PAUSE_SECONDS = 0.05
"""Pause after a small chunk. The cost of a chunk hardly depends on its size, so one stream of tiny ones would otherwise
take a processor."""
_SLOWEST_BYTES_PER_SECOND = 4 << 10
"""Minimum average rate of an upload, in bytes per second; slower uploads are aborted."""


class Transfers:
    """Moves objects between contributors and the store.

    Args:
        database: Database that records declarations and the senders of objects.
        store: Object store that receives the objects.
        max_bytes: Size limit of one object.
        private: If True, reveal only to senders and readers whether the hub has an object; others could otherwise test
            a guess about an update.
        limits: Quota and rate of one account.
        storage: Free space to leave on the disk, and how long unreferenced objects are kept.
        clock: The hub's clock, Unix seconds.
    """

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        max_bytes: int,
        private: bool = False,
        limits: LimitsConfig | None = None,
        storage: StorageConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits, self._storage, self._clock = limits or LimitsConfig(), storage or StorageConfig(), clock
        self._private = private
        self._database = database
        self._store = store
        self._max_bytes = max_bytes
        self._busy: set[tuple[str, str]] = set()

    @rerun
    def begin(
        self,
        contributor: str,
        sha256: str,
        size_bytes: int,
        also: Callable[[Connection], object] = lambda _: None,
    ) -> pb.UploadState:
        """Declare an upload; return the number of bytes that the hub already has.

        The declaration and the writes of ``also`` are one transaction.

        Raises:
            GymError: ``TOO_LARGE`` above the size limit, or for too many open uploads; ``DISK_FULL``; ``USAGE`` for an
                invalid name, or a size other than the declared one; ``HASH_MISMATCH`` if a complete upload that a crash
                interrupted has wrong bytes.
        """
        if self._may_know(contributor, sha256):  # grants nothing: knowing a hash gives no right to read
            with self._database.transaction() as tx:
                also(tx)
            return pb.UploadState(offset=size_bytes, complete=True)
        if not 0 < size_bytes <= self._max_bytes:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"object {sha256[:12]} is declared as {counted(size_bytes, 'byte')}; this hub accepts 1 to "
                f"{self._max_bytes}",
                "use a smaller codec or fewer trained weights",
            )
        free = min(shutil.disk_usage(folder).free for folder in self._store.folders)
        if free < size_bytes + self._storage.reserve_bytes:
            raise GymError(
                ErrorCode.DISK_FULL,
                "the hub's disk is full",
                "uploads resume when its coordinator has freed space",
            )
        with self._database.transaction() as tx:
            declared = tx.scalar(select(uploads.c.size_bytes).where(_declaration(contributor, sha256)))
            if declared is None:
                self._check_quota(tx, contributor, size_bytes)
                mine = select(func.count()).select_from(uploads).where(uploads.c.contributor == contributor)
                if int(tx.scalar(mine) or 0) >= MAX_OPEN_UPLOADS:
                    self._drop_oldest(tx, contributor)
                tx.execute(
                    uploads.insert().values(
                        contributor=contributor,
                        sha256=sha256,
                        size_bytes=size_bytes,
                        created_at=self._clock(),
                    )
                )
            elif declared != size_bytes:
                raise GymError(
                    ErrorCode.USAGE,
                    f"object {sha256[:12]} was declared as {counted(declared, 'byte')}, and now as {size_bytes}",
                )
            also(tx)
        part = self._store.part_path(contributor, sha256)
        part.touch(mode=0o600)
        offset = min(part.stat().st_size, size_bytes)
        if offset == size_bytes and (key := (contributor, sha256)) not in self._busy:
            self._busy.add(key)  # the hub was killed between the last byte and the steps that follow it
            try:
                self._finish(contributor, sha256, part)
            finally:
                self._busy.discard(key)
            return pb.UploadState(offset=offset, complete=True)
        return pb.UploadState(offset=offset, complete=False)

    def _check_quota(self, tx: Connection, contributor: str, size_bytes: int) -> None:
        """Refuse an upload beyond the account's quota, so that nobody can fill the disk with unmerged data."""
        most, held = self._limits.unreferenced_bytes_per_account, usage_of(tx, contributor)
        if held.total + size_bytes > most:
            raise GymError(
                ErrorCode.QUOTA_EXCEEDED,
                f"{contributor} has {counted(held.finished, 'byte')} of uploads that no merged update or "
                "variant uses, and "
                f"{counted(held.declared, 'byte')} of unfinished uploads; {size_bytes} more would exceed the "
                f"limit of {most}",
                f"wait: unused uploads are deleted after {readable_seconds(self._storage.keep_unneeded_seconds)}; "
                "or ask the coordinator to raise limits.unreferenced_bytes_per_account",
            )

    async def receive(
        self, contributor: str, chunks: AsyncIterator[pb.UploadChunk], check: Callable[[], None]
    ) -> pb.UploadState:
        """Append the chunks of one call; return once they are on disk.

        ``check`` is called before every chunk except the first, and raises if the caller may not continue.

        Raises:
            GymError: ``NOT_FOUND`` for an undeclared object, ``TOO_LARGE`` for more bytes than declared, ``USAGE`` for
                a gap, ``LEASE_LOST`` if another call uploads the same object, ``HASH_MISMATCH``, ``DEADLINE_EXCEEDED``
                if chunks stop or the upload is too slow.
        """
        waiting = self._limits.idle_upload_seconds
        first = await _next(chunks, waiting)
        if first is None:
            raise GymError(ErrorCode.USAGE, "the upload has no chunks")
        declared, is_known = await asyncio.to_thread(self._declared, contributor, first.sha256)
        if is_known:
            return pb.UploadState(offset=declared, complete=True)
        key = (contributor, first.sha256)
        if key in self._busy:
            raise GymError(
                ErrorCode.LEASE_LOST, f"object {first.sha256[:12]} is being uploaded by another stream"
            )
        self._busy.add(key)
        try:
            part = self._store.part_path(contributor, first.sha256)
            with open(part, "rb+") as file:
                offset = file.seek(0, os.SEEK_END)
                try:
                    slowest = waiting + (declared - offset) / _SLOWEST_BYTES_PER_SECOND
                    async with asyncio.timeout(slowest):
                        offset = await self._append(file, offset, declared, first, chunks, check)
                except TimeoutError:
                    raise GymError(
                        ErrorCode.DEADLINE_EXCEEDED,
                        f"object {first.sha256[:12]} arrived at less than {_SLOWEST_BYTES_PER_SECOND} bytes/s",
                        "repeat the upload: it resumes where it stopped",
                    ) from None
                finally:
                    await heavily(_sync, file)
            if offset < declared:
                return pb.UploadState(offset=offset, complete=False)
            await heavily(self._finish, contributor, first.sha256, part)
            return pb.UploadState(offset=offset, complete=True)
        finally:
            self._busy.discard(key)

    def _may_know(self, contributor: str, sha256: str) -> bool:
        """Return True if the store has the object and the contributor may learn that."""
        return self._store.has(sha256) and (not self._private or self._may_read(contributor, sha256))

    def readable(self, contributor: str, sha256: str) -> Path:
        """Return a local file of an object that the contributor may read.

        Raises:
            GymError: ``NOT_FOUND``, also if reading is not permitted, so that the object's existence is not revealed.
        """
        if not self._may_read(contributor, sha256):
            raise GymError(ErrorCode.NOT_FOUND, f"no object {sha256[:64]}")
        return self._store.local_path(sha256)

    def _may_read(self, contributor: str, sha256: str) -> bool:
        with self._database.reading() as tx:
            return may_read(tx, contributor, sha256)

    def check_sent(self, contributor: str, sha256: str) -> None:
        """Raise ``NOT_FOUND`` if the object is missing or the contributor may not learn that it exists."""
        if not self._may_know(contributor, sha256):
            raise GymError(ErrorCode.NOT_FOUND, f"object {sha256} was not uploaded", "upload it first")

    def check_present(self, contributor: str, records: pb.Records) -> None:
        """Raise ``NOT_FOUND`` unless every object that the records name has been uploaded."""
        for ref in references(records):
            if not self._may_know(contributor, ref.sha256):
                raise GymError(
                    ErrorCode.NOT_FOUND,
                    f"array {ref.name!r} refers to object {ref.sha256}, which was not uploaded",
                )

    async def _append(
        self,
        file: BinaryIO,
        offset: int,
        declared: int,
        first: pb.UploadChunk,
        chunks: AsyncIterator[pb.UploadChunk],
        check: Callable[[], None],
    ) -> int:
        unsynced = 0
        chunk: pb.UploadChunk | None = first
        while chunk is not None:
            if chunk.offset != offset:
                raise GymError(
                    ErrorCode.USAGE,
                    f"a chunk is at offset {chunk.offset}, but the hub has {counted(offset, 'byte')}",
                )
            if offset + len(chunk.data) > declared:
                raise GymError(
                    ErrorCode.TOO_LARGE,
                    f"the upload has {counted(offset + len(chunk.data), 'byte')} or more, but {declared} were declared",
                )
            await heavily(file.write, chunk.data)
            offset += len(chunk.data)
            unsynced += len(chunk.data)
            UPLOAD_BYTES.inc(len(chunk.data))
            if unsynced >= SYNC_BYTES:
                await heavily(_sync, file)
                unsynced = 0
            failpoint("upload-chunk")
            is_small = len(chunk.data) < _SMALL_CHUNK_BYTES
            chunk = await _next(chunks, self._limits.idle_upload_seconds)
            if chunk is not None:
                if is_small:
                    await asyncio.sleep(_PAUSE_SECONDS)
                await asyncio.to_thread(check)
        return offset

    def _finish(self, contributor: str, sha256: str, part: Path) -> None:
        try:
            size = self._store.adopt(part, sha256)
        except GymError:
            self._forget(contributor, sha256)
            raise
        with self._database.transaction() as tx:
            now = self._clock()
            insert_if_absent(tx, objects, sha256=sha256, size_bytes=size, created_at=now)
            # A repeated upload resets the object's age, so that gc keeps it until an update refers to it.
            tx.execute(update(objects).where(objects.c.sha256 == sha256).values(created_at=now))
            insert_if_absent(tx, readers, sha256=sha256, contributor=contributor)
            tx.execute(uploads.delete().where(_declaration(contributor, sha256)))

    def _declared(self, contributor: str, sha256: str) -> tuple[int, bool]:
        """Return the declared size of an upload, and True if the contributor may learn that the hub has the object."""
        with self._database.reading() as tx:
            declared = tx.scalar(select(uploads.c.size_bytes).where(_declaration(contributor, sha256)))
        if declared is None:
            raise GymError(
                ErrorCode.NOT_FOUND, f"object {sha256[:64]!r} was not declared", "call BeginUpload first"
            )
        return int(declared), self._may_know(contributor, sha256)

    def _forget(self, contributor: str, sha256: str) -> None:
        with self._database.transaction() as tx:
            tx.execute(uploads.delete().where(_declaration(contributor, sha256)))

    def _drop_oldest(self, tx: Connection, contributor: str) -> None:
        oldest = tx.scalar(
            select(uploads.c.sha256)
            .where(uploads.c.contributor == contributor)
            .order_by(uploads.c.created_at)
            .limit(1)
        )
        if (contributor, oldest) in self._busy:
            raise GymError(ErrorCode.TOO_LARGE, f"more than {MAX_OPEN_UPLOADS} uploads at once")
        self._store.part_path(contributor, str(oldest)).unlink(missing_ok=True)
        tx.execute(uploads.delete().where(_declaration(contributor, str(oldest))))


def _declaration(contributor: str, sha256: str) -> ColumnElement[bool]:
    return (uploads.c.contributor == contributor) & (uploads.c.sha256 == sha256)


async def read_ahead(path: Path, offset: int) -> AsyncIterator[bytes]:
    """Yield a file's chunks from ``offset``, reading one ahead and keeping no file open for slow readers."""
    following = _reading(path, offset)
    try:
        while data := await following:
            offset += len(data)
            following = _reading(path, offset)
            yield data
    finally:
        following.cancel()


def _reading(path: Path, offset: int) -> asyncio.Future[bytes]:
    return asyncio.ensure_future(heavily(_read_at, path, offset))


def _read_at(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


async def _next(chunks: AsyncIterator[pb.UploadChunk], seconds: float) -> pb.UploadChunk | None:
    try:
        # Python 3.11's wait_for loses a cancellation, here by the upload's timeout, that arrives together with the
        # chunk.
        async with asyncio.timeout(seconds):
            return await anext(chunks, None)
    except TimeoutError:
        raise GymError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"the upload received no data for {seconds:.0f} s",
            "repeat the upload: it resumes where it stopped",
        ) from None
