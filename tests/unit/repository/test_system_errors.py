"""Failures of the system become errors with a code and a remedy: by errno, from SQLite, and on real disks."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy.exc import OperationalError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.system_errors import system_error
from tests.support.in_process import run_here
from tests.support.wait import SECONDS

NOBODY = 65534


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ErrorCode.DISK_FULL),
        (errno.EDQUOT, ErrorCode.DISK_FULL),
        (errno.EROFS, ErrorCode.NOT_WRITABLE),
        (errno.EACCES, ErrorCode.NOT_WRITABLE),
        (errno.EPERM, ErrorCode.NOT_WRITABLE),
        (errno.EIO, ErrorCode.NOT_WRITABLE),
        (errno.ENOENT, ErrorCode.FILE_NOT_FOUND),
        (errno.EEXIST, ErrorCode.FILE_EXISTS),
        (errno.EMFILE, ErrorCode.BUSY),
        (errno.EADDRINUSE, ErrorCode.ADDRESS_IN_USE),
        (errno.ECONNREFUSED, ErrorCode.UNAVAILABLE),
        (errno.EXDEV, ErrorCode.NOT_WRITABLE),
    ],
)
def test_an_errno_has_one_code_and_names_the_file(number: int, code: ErrorCode) -> None:
    found = system_error(OSError(number, os.strerror(number), "/hub/hub.db"))
    assert found is not None
    assert found.code is code
    assert found.message.startswith("/hub/hub.db: ")
    reported = system_error(OSError(number, os.strerror(number), "/hub/hub.db"), with_place=False)
    assert reported is not None
    assert "hub.db" not in str(reported), "what goes over the wire names no file"


def test_what_rust_and_sqlalchemy_say_of_a_full_disk_is_understood() -> None:
    rust = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (found := system_error(rust)) is not None
    assert found.code is ErrorCode.DISK_FULL
    inner = sqlite3.OperationalError("database or disk is full")
    inner.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert (found := system_error(OperationalError("INSERT", {}, inner))) is not None
    assert found.code is ErrorCode.DISK_FULL
    for defect in (ValueError("x"), KeyError("y"), sqlite3.OperationalError("no such table: x")):
        assert system_error(defect) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not shutil.which("mount") or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_memory_that_torch_cannot_have_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    for error in (caught.value, MemoryError()):
        found = system_error(error)
        assert found is not None
        assert (found.code, found.message) == (ErrorCode.BUSY, "no memory is left")


def test_a_thread_that_cannot_be_started_is_named() -> None:
    found = system_error(RuntimeError("can't start new thread"))
    assert found is not None
    assert (found.code, "ulimit -u" in found.hint) == (ErrorCode.BUSY, True)


def test_a_server_that_may_open_too_few_files_is_refused_before_it_listens() -> None:
    script = (
        "import logging, resource\n"
        "from gym_fed.core.files import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (63, 63))\n"
        "raise_file_limit(10, logging.getLogger())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode != 0
    assert "this process may open 63 files, but a server needs at least 64" in done.stderr
    assert "LimitNOFILE" in done.stderr


def test_a_disk_that_is_really_full_ends_commands_with_its_code(small_disk: Path) -> None:
    assert command("gym-server", "init", "--dir", str(small_disk / "hub"))[0] == 0
    (small_disk / "home").mkdir()
    fill(small_disk / "filler")
    with pytest.raises(GymError) as caught:
        write_atomically(small_disk / "more", b"x" * 100_000)
    assert caught.value.code is ErrorCode.DISK_FULL
    status, text = command("gym-client", "id", "--home", str(small_disk / "home"))
    assert (status, "Traceback" in text) == (ErrorCode.DISK_FULL.exit_code, False), text
    status, text = command(
        "gym-server", "invites", "create", "--count", "1000", "--dir", str(small_disk / "hub")
    )
    assert (status, "Traceback" in text) == (ErrorCode.DISK_FULL.exit_code, False), text
    status, text = command(
        "gym-server", "run", "--dir", str(small_disk / "hub"), "--set", "listen=127.0.0.1:0"
    )
    assert (status, "Traceback" in text) == (ErrorCode.DISK_FULL.exit_code, False), text


@pytest.mark.slow  # a process for each command
def test_a_disk_that_becomes_read_only_ends_commands_with_its_code(small_disk: Path) -> None:
    assert command("gym-server", "init", "--dir", str(small_disk / "hub"))[0] == 0
    (small_disk / "home").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for words in (
        ("gym-server", "invites", "create", "--dir", str(small_disk / "hub")),
        ("gym-server", "run", "--dir", str(small_disk / "hub"), "--set", "listen=127.0.0.1:0"),
        ("gym-server", "init", "--dir", str(small_disk / "second")),
        ("gym-client", "id", "--home", str(small_disk / "home")),
    ):
        status, text = command(*words)
        assert (status, "Traceback" in text) == (ErrorCode.NOT_WRITABLE.exit_code, False), (words, text)


@pytest.mark.slow  # a process for each command
def test_a_folder_of_somebody_else_ends_commands_with_its_code(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("a folder of somebody else needs root, and setpriv to give up root's right to every file")
    folder = tmp_path / "theirs"
    assert command("gym-server", "init", "--dir", str(folder / "hub"))[0] == 0
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    folder.chmod(0o755)
    (folder / "hub").chmod(0o755)
    (folder / "hub" / "gym-server.yaml").chmod(0o644)  # else it is not even read
    no_override = "-dac_override,-dac_read_search"
    plain_user = ("setpriv", f"--bounding-set={no_override}", f"--inh-caps={no_override}")
    for words in (
        ("gym-server", "status", "--dir", str(folder / "hub")),
        ("gym-server", "run", "--dir", str(folder / "hub")),
        ("gym-client", "id", "--home", str(folder)),
    ):
        status, text = command(*words, under=plain_user)
        assert (status, "Traceback" in text) == (ErrorCode.NOT_WRITABLE.exit_code, False), (words, text)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def command(*words: str, under: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit status of a command and everything that it wrote."""
    done = subprocess.run(
        [*under, Path(sys.executable).parent / words[0], *words[1:]],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["models", "list", "--registry", "s3://bucket/models"],
        ["data", "show", "s3://bucket/rows.jsonl"],
    ],
)
def test_an_unreachable_object_store_ends_a_command_with_its_reason(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "a secret",
        "AWS_ALLOW_HTTP": "true",
        "GYM_HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    ended = run_here(["gym", *words])
    assert "error (unavailable): the remote store: " in ended.stderr
    assert "credentials in the environment" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "a secret" not in ended.stderr
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    ended = run_here(["gym", *words])
    assert "error (unavailable): S3: no credentials are in the environment: " in ended.stderr
    assert "set AWS_ACCESS_KEY_ID" in ended.stderr
