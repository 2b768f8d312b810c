"""A run folder from somebody else, with links to files that are not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.folder import RunFolder
from tests.support.adapters import settings


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "model.safetensors", ".lock", "checkpoints/checkpoint-9/model.pt"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_run_overwrites_no_file_that_a_link_in_its_folder_leads_to(
    tiny_base: Path, tmp_path: Path, name: str, exists: bool
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    if exists:
        outside.write_text("mine")
    config = settings(folder, model=str(tiny_base))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(outside)
    (folder / "run.json").write_text("{}")
    begin = [lambda: RunFolder(folder).open(config, "digest", resume=True)]
    if name == ".lock":
        begin.append(lambda: RunFolder(folder).delete())
    for act in begin:
        with pytest.raises(GymError, match=f"{Path(name).name} is a link, so a file") as raised:
            act()
        assert raised.value.code is ErrorCode.FILE_EXISTS
    assert outside.exists() == exists
    assert not exists or outside.read_text() == "mine"


def test_links_within_the_folder_and_checkpoints_on_another_disk_are_accepted(
    tiny_base: Path, tmp_path: Path
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "checkpoints").symlink_to(disk)
    (folder / "tracker.log").symlink_to(folder / "tracker-1.log")
    run = RunFolder(folder)
    assert run.open(settings(folder, model=str(tiny_base)), "digest", resume=True) is None
    run.close()
