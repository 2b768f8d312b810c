"""Who may read and replace the files of a hub that is made under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_server.cli.setup import HubChoices, init_hub


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("exists", [False, True])
def test_a_new_hub_belongs_to_its_coordinator_alone(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "hub"
    if exists:
        folder.mkdir()  # a volume, for example; its mode is the coordinator's choice
    init_hub(folder, HubChoices("described", "mine", "open"))
    files = list(folder.iterdir()) if exists else [folder, *folder.iterdir()]
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
