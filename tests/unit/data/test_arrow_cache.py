"""The cache of Arrow files: an entry is valid when it is complete."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import disk_full
from gym_fed.core.portable import SIGKILL, opens_folders
from gym_fed.data import arrow_cache
from gym_fed.data.arrow_cache import ArrowCache, recipe_digest

needs_modes = pytest.mark.skipif(not opens_folders(), reason="Windows has no modes and locks no mapped files")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrowCache:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    return ArrowCache(recipe_digest({"rows": 1}))


def written(sink: IO[bytes]) -> Iterator[int]:
    for number in range(3):
        sink.write(b"abc")
        yield number


def test_a_file_is_valid_after_the_last_item_with_its_facts(cache: ArrowCache) -> None:
    work = cache.fill(written, lambda: {"rows": 3})
    assert next(work) == 0
    assert not cache.is_filled()
    assert list(work) == [1, 2]
    assert cache.is_filled()
    assert cache.facts() == {"rows": 3}
    assert cache.path.read_bytes() == b"abc" * 3


def test_work_that_ends_early_leaves_nothing(cache: ArrowCache) -> None:
    work = cache.fill(written, dict)
    next(work)
    work.close()
    assert not cache.is_filled()
    assert list(cache.path.parent.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "no index", "no index's end"])
def test_a_damaged_entry_is_written_again(cache: ArrowCache, harm: str) -> None:
    list(cache.fill(written, dict))
    index = cache.path.with_suffix(".json")
    if harm == "cut":
        cache.path.write_bytes(b"abc")
    elif harm == "no index":
        index.unlink()
    else:
        index.write_text(index.read_text()[:-5])
    assert not cache.is_filled()
    list(cache.fill(written, dict))
    assert cache.is_filled()


def test_a_source_that_changes_while_it_is_read_keeps_nothing(cache: ArrowCache) -> None:
    assert list(cache.fill(written, dict, lambda: "another digest")) == [0, 1, 2]
    assert not cache.is_filled()
    assert list(cache.path.parent.iterdir()) == []
    list(cache.fill(written, dict, lambda: cache.path.stem))
    assert cache.is_filled()


@pytest.mark.parametrize("harm", ["bytes", "size", "facts", "digest", "no object"])
def test_changed_bytes_are_reported_and_written_again(
    cache: ArrowCache, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    list(cache.fill(written, lambda: {"largest": 7}))
    assert cache.is_intact()
    assert capsys.readouterr().err == ""
    index = cache.path.with_suffix(".json")
    stored = json.loads(index.read_text())
    if harm == "bytes":
        cache.path.write_bytes(b"abd" * 3)
    elif harm == "size":
        cache.path.write_bytes(b"abc")
    elif harm == "facts":
        index.write_text(json.dumps({**stored, "facts": {"largest": 6}}))
    elif harm == "digest":
        index.write_text(json.dumps({**stored, "sha256": "0" * 64}))
    else:
        index.write_text("[]")
    assert not cache.is_intact()
    said = "".join(capsys.readouterr().err.split())  # the console wraps lines
    assert f"{cache.path}:itsbyteshavechanged;itwillberewritten" in said
    list(cache.fill(written, lambda: {"largest": 7}))
    assert cache.is_intact()
    assert cache.facts() == {"largest": 7}
    assert cache.path.read_bytes() == b"abc" * 3


def test_an_absent_file_is_no_damage(cache: ArrowCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert not cache.is_intact()
    list(cache.fill(written, dict))
    cache.path.unlink()
    assert not cache.is_intact()
    assert capsys.readouterr().err == ""


@needs_modes
def test_no_other_user_reads_the_common_folder(cache: ArrowCache) -> None:
    before = os.umask(0)
    try:
        work = cache.fill(written, dict)
        next(work)
        (part,) = cache.path.parent.glob(".*.part/*")
        assert part.stat().st_mode & 0o777 == 0o600
        assert list(work) == [1, 2]
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in cache.path.parent.iterdir()}
    assert modes == {0o600}
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700
    cache.path.parent.chmod(0o755)
    assert cache.is_intact()
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700


@needs_modes
def test_a_named_folder_follows_the_umask(tmp_path: Path) -> None:
    cache = ArrowCache("a", tmp_path / "named")
    before = os.umask(0o022)
    try:
        list(cache.fill(written, dict))
    finally:
        os.umask(before)
    assert cache.path.stat().st_mode & 0o777 == 0o644
    assert cache.path.parent.stat().st_mode & 0o777 == 0o755


WRITER = """
import sys, time
from gym_fed.data.arrow_cache import ArrowCache

def write(sink):
    sink.write(b"z" * 9)
    yield 1

digest, state = sys.argv[1:]
work = ArrowCache(digest).fill(write, dict)
next(work)
if state == "written":
    list(work)
print(state, flush=True)
time.sleep(600)
"""


def other_process(digest: str, state: str) -> subprocess.Popen[str]:
    """Start a process that is ``writing`` a file or has ``written`` it, and wait for it."""
    arguments = [sys.executable, "-c", WRITER, digest, state]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == state
    return process


@needs_modes
def test_parts_of_killed_writers_are_removed_and_those_of_others_kept(cache: ArrowCache) -> None:
    killed, other = other_process("a" * 64, "writing"), other_process("b" * 64, "writing")
    try:
        killed.send_signal(SIGKILL)
        killed.communicate()
        folder = cache.path.parent
        assert len(list(folder.glob(".*.part"))) == 2
        list(cache.fill(written, dict))
        (left,) = folder.glob(".*.part")
        assert left.name.startswith(f".{'b' * 64}")
    finally:
        other.kill()
        other.communicate()


@needs_modes
def test_the_least_recently_used_files_are_removed_above_the_limit(
    cache: ArrowCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mapped = other_process("m" * 64, "written")
    try:
        folder = cache.path.parent
        for name in "abc":
            list(ArrowCache(name * 64).fill(written, dict))
        for held in arrow_cache._held_files.values():  # as if their processes had ended
            held.close()
        arrow_cache._held_files.clear()
        now = time.time()
        for age, name in enumerate("mbca"):
            os.utime(folder / f"{name * 64}.arrow", (now - 1000 + age, now - 1000 + age))
        assert ArrowCache("b" * 64).is_intact()  # now the most recently used one, and in use
        monkeypatch.setattr(arrow_cache, "MAX_CACHE_BYTES", 27)
        list(cache.fill(written, dict))
        kept = {file.stem[0] for file in folder.glob("*.arrow") if file != cache.path}
        assert kept == {"a", "b", "m"}  # m is in use, c was used before a
        assert {file.stem for file in folder.glob("*.json")} == {file.stem for file in folder.glob("*.arrow")}
        assert cache.is_intact()
        said = " ".join(capsys.readouterr().err.split())
        assert "exceeded 27 B: removed the least recently used 1 file (9 B)" in said
    finally:
        mapped.kill()
        mapped.communicate()


@needs_modes
def test_a_named_folder_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_cache, "MAX_CACHE_BYTES", 0)
    for name in "ab":
        list(ArrowCache(name, tmp_path).fill(written, dict))
    assert len(list(tmp_path.glob("*.arrow"))) == 2


@pytest.mark.parametrize(
    ("number", "code", "way"),
    [
        (errno.ENOSPC, ErrorCode.DISK_FULL, "free some space (cached rows take about seven times"),
        (errno.EFBIG, ErrorCode.TOO_LARGE, "raise the limit (ulimit -f)"),
    ],
)
def test_a_full_disk_and_a_limit_name_the_file_and_the_ways_out(
    cache: ArrowCache, tmp_path: Path, number: int, code: ErrorCode, way: str
) -> None:
    def failing(sink: IO[bytes]) -> Iterator[int]:
        yield sink.write(b"a")
        raise OSError(number, os.strerror(number))

    with pytest.raises(GymError) as caught:
        list(cache.fill(failing, dict))
    assert caught.value.code is code
    assert str(cache.path) in caught.value.message
    assert caught.value.hint.startswith(way)
    for name in (str(cache.path.parent), "GYM_HOME", "streaming: true"):
        assert name in caught.value.hint
    named = ArrowCache("a", tmp_path / "named")
    with pytest.raises(GymError) as caught:
        list(named.fill(failing, dict))
    assert caught.value.code is code
    assert caught.value.hint.endswith(", or choose another folder")
    assert list(cache.path.parent.iterdir()) == list(named.path.parent.iterdir()) == []


def test_an_index_that_cannot_be_written_leaves_no_file(
    cache: ArrowCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise disk_full(path)

    monkeypatch.setattr(arrow_cache, "write_atomically", full)
    with pytest.raises(GymError, match="no space is left"):
        list(cache.fill(written, dict))
    assert list(cache.path.parent.iterdir()) == []


def test_other_recipes_have_other_names() -> None:
    assert recipe_digest({"rows": 1}) != recipe_digest({"rows": 2})
