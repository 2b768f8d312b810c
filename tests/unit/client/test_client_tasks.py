"""Task folders: what a killed agent finds again, and what is thrown away."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.tasks import FinishedUpdate, TaskFolder, Trained, drop_old

from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey

BASE = "sha256:" + "a" * 64
KEY = SigningKey.generate()
SETUP = {"data": "d"}


def spec(server_round: int = 1, server: str = "s" + "0" * 16) -> TaskSpec:
    return TaskSpec(
        server=server,
        server_round=server_round,
        base_model="tiny",
        base_digest=BASE,
        version_digest=BASE,
        max_update_bytes=100,
        deadline_seconds=4e9,
    )


def finished(folder: TaskFolder, task: TaskSpec, now: float | None = None) -> FinishedUpdate:
    folder.begin(task, SETUP)
    folder.delta_path.write_bytes(b"delta")
    return folder.finish(task, Trained("b" * 64, 5, 3, {"train_loss": 1.5}), KEY, now or time.time())


def test_a_finished_update_reads_back_as_it_was_signed(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path / "m1")
    update = finished(folder, spec())
    assert TaskFolder(tmp_path / "m1").renewed(spec(), KEY, time.time()) == update
    update.manifest.verify(KEY.public_key, update.signature)


def test_a_manifest_about_to_expire_is_signed_anew_over_the_same_delta(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path / "m1")
    old = finished(folder, spec(), time.time() - 24 * 3600 + 60)
    new = folder.renewed(spec(), KEY, time.time())
    assert new is not None
    assert new.manifest.delta_sha256 == old.manifest.delta_sha256
    assert new.manifest.nonce != old.manifest.nonce
    assert new.manifest.expires_at_seconds > time.time() + 3600
    assert folder.renewed(spec(), KEY, time.time()) == new


def test_an_update_by_a_replaced_key_is_signed_anew_in_the_same_accounts_name(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path / "m1")
    old = finished(folder, spec())
    key = SigningKey.generate().of_account(KEY.contributor)
    new = folder.renewed(spec(), key, time.time())
    assert new is not None
    assert new.manifest.contributor == old.manifest.contributor == KEY.contributor
    assert new.manifest.delta_sha256 == old.manifest.delta_sha256
    new.manifest.verify(key.public_key, new.signature)


def test_other_data_starts_the_task_afresh(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path / "m1")
    finished(folder, spec())
    folder.begin(spec(), {"data": "other"})
    assert folder.finished() is None


def test_earlier_rounds_of_the_same_hub_are_thrown_away_and_other_hubs_are_not(tmp_path: Path) -> None:
    other = "s" + "1" * 16
    for name, task in (("old", spec(1)), ("elsewhere", spec(1, other)), ("new", spec(2))):
        TaskFolder(tmp_path / name).begin(task, SETUP)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "new"}


def test_tasks_that_a_hub_takes_back_without_end_leave_the_work_of_few(tmp_path: Path) -> None:
    other = TaskFolder(tmp_path / "other")
    other.begin(spec(1, server="s" + "1" * 16), SETUP)
    for server_round in range(30, 10, -1):
        TaskFolder(tmp_path / f"m{server_round}").begin(spec(server_round), SETUP)
        os.utime(tmp_path / f"m{server_round}" / "task.json", (1, 31 - server_round))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m11", "m12", "m13", "other"]


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no-delta"])
def test_a_damaged_update_is_named_instead_of_sent(tmp_path: Path, damage: str) -> None:
    folder = TaskFolder(tmp_path / "m1")
    finished(folder, spec())
    if damage == "truncate":
        folder.delta_path.write_bytes(b"del")
    elif damage == "garbage":
        (folder.path / "finished.json").write_text('{"manifest": 3')
    else:
        folder.delta_path.unlink()
    with pytest.raises(GymError, match="m1") as caught:
        folder.finished()
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert "delete the folder" in caught.value.hint


def test_what_a_kill_left_of_a_run_that_had_not_begun_is_removed(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path / "m1")
    folder.begin(spec(), SETUP)
    folder.run.mkdir()
    (folder.run / "config.yaml").write_text("half")
    assert not folder.prepare_run().exists()
    folder.run.mkdir()
    (folder.run / "run.json").write_text("{}")
    assert folder.prepare_run().exists()


def test_tasks_of_last_month_are_removed(tmp_path: Path) -> None:
    for name, days in (("old", 30), ("new", 1)):
        (tmp_path / name).mkdir()
        stamp: Any = time.time() - days * 86_400
        os.utime(tmp_path / name, (stamp, stamp))
    drop_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
