"""Concurrent and killed exports leave a complete file or none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in, real_path, whole_file_or_none, whole_or_not_at_all

Whole = Callable[[Path], AbstractContextManager[Path]]
BOTH = pytest.mark.parametrize("whole", [whole_or_not_at_all, whole_file_or_none])


def fill(part: Path, text: str) -> None:
    (part / "weights" if part.is_dir() else part).write_text(text)


def content(path: Path) -> str:
    return (path / "weights" if path.is_dir() else path).read_text()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@BOTH
def test_of_two_at_once_the_first_to_end_wins_and_the_other_is_refused(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "new" / "model"

    def write_late() -> None:
        with whole(path) as outer:
            fill(outer, "late")
            with whole(path) as inner:
                fill(inner, "first")
            assert content(outer) == "late"

    with pytest.raises(GymError, match="another process has just written it") as raised:
        write_late()
    assert raised.value.code is ErrorCode.FILE_EXISTS
    assert content(path) == "first"
    assert hidden(path.parent) == []


@BOTH
def test_a_killed_one_leaves_nothing_under_the_name_and_the_next_one_clears_it_away(
    tmp_path: Path, whole: Whole
) -> None:
    path = tmp_path / "model"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"from gym_fed.core.files import {whole.__name__} as whole\n"
        "with whole(Path(sys.argv[1])) as part:\n"
        "    (part / 'weights' if part.is_dir() else part).write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(hidden(tmp_path)) == 1
    with whole(path) as part:
        assert hidden(tmp_path) == [part.parent.name]
        fill(part, "whole")
    assert content(path) == "whole"
    assert hidden(tmp_path) == []


@BOTH
def test_an_error_leaves_nothing(tmp_path: Path, whole: Whole) -> None:
    def fail() -> None:
        with whole(tmp_path / "model") as part:
            fill(part, "half")
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_disk_without_hard_links_and_locks_gets_the_file_and_no_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(fcntl, "flock", refused)
    with whole_file_or_none(tmp_path / "a.gymdelta") as part:
        fill(part, "one")
    with pytest.raises(GymError, match="exists"), whole_file_or_none(tmp_path / "a.gymdelta") as part:
        fill(part, "two")
    assert content(tmp_path / "a.gymdelta") == "one"


def test_a_circle_of_links_is_no_file_of_its_folder_and_no_error(tmp_path: Path) -> None:
    circle = tmp_path / "LICENSE"
    circle.symlink_to(circle)
    assert not lies_in(circle, tmp_path)
    assert real_path(circle).parent == real_path(tmp_path)
