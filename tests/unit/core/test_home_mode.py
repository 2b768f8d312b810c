"""The home folder holds keys, so it is private whatever is written into it first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gym_fed.cli.chat.command import _read_history
from gym_fed.core.files import default_home, make_folder, write_atomically
from gym_fed.data.objects import Objects


@pytest.fixture
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home that does not exist yet, under the usual umask."""
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    before = os.umask(0o022)
    yield tmp_path / "home"
    os.umask(before)


@pytest.mark.parametrize(
    "write",
    [
        lambda home: make_folder(home),
        lambda home: make_folder(home / "evals" / "data"),
        lambda home: write_atomically(home / "packed" / "file", b"x"),
        lambda home: Objects(home / "datasets").create("name/1", b"x"),
        lambda home: _read_history(home / "chat_history"),
    ],
    ids=["home", "folder", "file", "object", "history"],
)
def test_a_home_that_is_made_on_the_way_to_something_in_it_is_private(
    fresh_home: Path, write: Callable[[Path], object]
) -> None:
    write(default_home())

    assert stat.S_IMODE(fresh_home.stat().st_mode) == 0o700


def test_other_folders_keep_the_mode_of_the_umask(fresh_home: Path) -> None:
    make_folder(fresh_home.parent / "runs" / "one")

    assert stat.S_IMODE((fresh_home.parent / "runs").stat().st_mode) == 0o755
