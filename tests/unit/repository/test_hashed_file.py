"""Bytes that are hashed and written by a thread: whole, on the disk when it says so, few of them in memory."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import threading
import time
from pathlib import Path

import pytest

from gym_fed.core.hashed_file import HashedFile
from tests.support.wait import SECONDS

MIB = 1 << 20


@pytest.mark.parametrize("held", [0, 5, 3 * MIB + 7])
def test_the_hash_is_that_of_the_whole_file_what_it_had_before_too(tmp_path: Path, held: int) -> None:
    data, path = secrets.token_bytes(6 * MIB + 1), tmp_path / "file"
    path.write_bytes(data[:held])
    with path.open("a+b") as file, HashedFile(file) as written:
        for start in range(held, len(data), 999_983):
            written.write(data[start : start + 999_983])
        sha256 = written.finish()
    assert path.read_bytes() == data
    assert sha256 == hashlib.sha256(data).hexdigest()


def test_every_byte_is_synced_before_the_hash_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        real(descriptor)
        synced.append(size)

    monkeypatch.setattr(os, "fsync", fsync)
    with (tmp_path / "file").open("w+b") as file, HashedFile(file) as written:
        for _ in range(35):
            written.write(bytes(MIB))
        written.write(b"end")
        written.finish()
        assert synced == [16 * MIB, 32 * MIB, 35 * MIB + 3]


def test_a_disk_that_takes_nothing_is_an_error_of_the_writer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, HashedFile(file) as written:
        written.write(b"block")
        with pytest.raises(io.UnsupportedOperation):
            written.finish()
        with pytest.raises(io.UnsupportedOperation):
            written.write(b"more")


def test_a_disk_that_cannot_be_synced_at_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with (tmp_path / "file").open("w+b") as file, HashedFile(file) as written:
        written.write(b"block")
        with pytest.raises(OSError, match="no space"):
            written.finish()


class Slow(io.BytesIO):
    """A disk that takes nothing until the gate opens."""

    gate = threading.Event()

    def write(self, data: object) -> int:
        self.gate.wait(SECONDS)
        return 0


def test_what_brings_the_bytes_waits_for_a_slow_disk() -> None:
    handed: list[int] = []
    written = HashedFile(Slow())

    def feed() -> None:
        for number in range(100):
            written.write(b"block")
            handed.append(number)

    feeder = threading.Thread(target=feed)
    feeder.start()
    time.sleep(0.3)
    assert len(handed) <= 10
    Slow.gate.set()
    feeder.join(SECONDS)
    assert len(handed) == 100
    with pytest.raises(io.UnsupportedOperation, match="fileno"):  # no file that could be synced
        written.finish()
