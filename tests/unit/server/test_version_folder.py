"""The folder of the newest version: what a failed writer leaves is removed, since rounds need the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.rounds.version_process import VersionJob
from gym_server.rounds.versions import Version
from gym_server.web.version_folder import NotWritten, VersionFolder


@pytest.mark.parametrize("problem", [NotWritten(["disk full"]), OSError("no process")])
def test_a_version_that_could_not_be_written_takes_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    storage = SimpleNamespace(objects=None, max_local_copy_bytes=1)
    live_config: Any = SimpleNamespace(current=SimpleNamespace(base_model="base", storage=storage))
    base: Any = SimpleNamespace(to_dict=dict)
    round_store: Any = SimpleNamespace(soups=lambda height: [])
    monkeypatch.setattr("gym_server.web.version_folder.objects_url", lambda folder, config: str(folder))

    def run(folder: VersionFolder, job: VersionJob) -> list[str]:
        job.output.mkdir()
        (job.output / "model.safetensors").write_bytes(b"half")
        raise problem

    monkeypatch.setattr(VersionFolder, "_run", run)
    root = tmp_path / "newest-model"
    with pytest.raises(type(problem)):
        VersionFolder(live_config, tmp_path, base, round_store, root, tmp_path / "staging").write(
            Version(1, "d")
        )
    assert list(root.iterdir()) == []
