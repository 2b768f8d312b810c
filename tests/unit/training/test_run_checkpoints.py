"""Checkpoints are sealed when complete, verified before a run resumes, and never silently replaced by a new start."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.checkpoints import SEAL, damage, newest_intact, seal
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trainer import Trainer
from tests.support.adapters import ROWS, run, settings

FILES = {
    "full": ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    "lora": ("adapter_model.safetensors", "optimizer.pt"),
}
CASES = [(method, name) for method, names in FILES.items() for name in names]


class Killed(Exception):
    """What a kill leaves on the disk is what this leaves."""


@pytest.fixture(scope="module", params=["full", "lora"])
def killed(
    request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """A method; a run of six steps that was killed after the fifth, with checkpoints 2 and 4; and one that was not."""

    def stop(step: int, *_: Any) -> None:
        if step == 5:
            raise Killed

    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(Killed):
        Trainer(settings(folder / "killed", **common(tiny_base, request.param)), on_step=stop).train(ROWS)
    run(folder / "whole", **common(tiny_base, request.param))
    return request.param, folder / "killed", folder / "whole"


def common(base: Path, method: str) -> dict[str, Any]:
    return {
        "model": str(base),
        "finetuning": method,
        "max_steps": 6,
        "save_steps": 2,
        "save_total_limit": 2,
    }


def truncate(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_every_checkpoint_is_sealed_with_the_digests_of_all_its_files(
    killed: tuple[str, Path, Path],
) -> None:
    for checkpoint in (killed[1] / "checkpoints").iterdir():
        names = {file.name for file in checkpoint.iterdir()} - {SEAL}
        assert set(FILES[killed[0]]) <= names
        assert json.loads((checkpoint / SEAL).read_text())["files"].keys() == names
        assert damage(checkpoint) is None


@pytest.mark.few(3, "one check for every damage")
@pytest.mark.parametrize("spoil", [truncate, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_is_named_and_the_run_resumes_from_the_one_before_to_the_same_bits(
    tiny_base: Path, killed: tuple[str, Path, Path], tmp_path: Path, spoil: Any
) -> None:
    method, folder, whole = killed
    for name in FILES[method]:
        again = tmp_path / name
        shutil.copytree(folder, again)
        spoil(again / "checkpoints/checkpoint-4" / name)
        steps: list[int] = []
        config = settings(again, **common(tiny_base, method))
        trainer = Trainer(config, on_step=lambda step, *_, seen=steps: seen.append(step))
        with pytest.warns(RunWarning, match=rf"checkpoint-4 is damaged: {name}.* resumes from checkpoint-2"):
            trainer.train(ROWS)
        assert steps == [3, 4, 5, 6]
        assert (again / "checkpoints/damaged-checkpoint-4" / "config.json").is_file() or method == "lora"
        weights = FILES[method][0]
        expected, found = load_file(whole / weights), load_file(again / weights)
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_is_changed(
    tiny_base: Path, killed: tuple[str, Path, Path], tmp_path: Path
) -> None:
    method, folder, _ = killed
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    for step in (2, 4):
        truncate(again / f"checkpoints/checkpoint-{step}" / FILES[method][0])
    before = {file: file.read_bytes() for file in again.rglob("*") if file.is_file()}
    with pytest.raises(
        GymError, match=r"no checkpoint is intact: checkpoint-4: .* of its .*; checkpoint-2: "
    ) as caught:
        run(again, **common(tiny_base, method))
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert "--overwrite" in caught.value.hint
    assert {file: file.read_bytes() for file in again.rglob("*") if file.is_file()} == before
    RunFolder(again).delete()  # what --overwrite does
    assert run(again, **common(tiny_base, method)).steps == 6


def test_a_damaged_checkpoint_that_the_config_names_is_refused_by_name(
    tiny_base: Path, killed: tuple[str, Path, Path], tmp_path: Path
) -> None:
    method, folder, _ = killed
    shutil.copytree(folder, tmp_path / "again")
    named = tmp_path / "again/checkpoints/checkpoint-4"
    truncate(named / FILES[method][0])
    for output in (tmp_path / "again", tmp_path / "new"):
        with pytest.raises(GymError, match=rf"checkpoint-4 is damaged: {FILES[method][0]} has") as caught:
            run(output, **common(tiny_base, method), resume_from_checkpoint=str(named))
        assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert not (tmp_path / "new").exists()
    (named / SEAL).unlink()
    with pytest.raises(GymError, match="saving was interrupted"):
        run(tmp_path / "new", **common(tiny_base, method), resume_from_checkpoint=str(named))


def test_a_checkpoint_whose_saving_was_cut_off_is_deleted_and_reported(
    killed: tuple[str, Path, Path], tmp_path: Path
) -> None:
    folder = killed[1]
    shutil.copytree(folder, tmp_path / "again")
    (tmp_path / "again/checkpoints/checkpoint-4" / SEAL).unlink()
    with pytest.warns(RunWarning, match="checkpoint-4: deleted, because saving was interrupted"):
        assert RunFolder(tmp_path / "again").last_checkpoint() == tmp_path / "again/checkpoints/checkpoint-2"
    assert not (tmp_path / "again/checkpoints/checkpoint-4").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": {"bytes": 1}}}', '{"files": {"a": 3}}', "\xff"])
def test_a_seal_that_cannot_be_read_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_bytes(b"a")
    seal(tmp_path)
    assert damage(tmp_path) is None
    (tmp_path / SEAL).write_text(text, encoding="latin-1")
    assert damage(tmp_path) == f"{SEAL} cannot be read"


def test_an_older_checkpoint_is_deleted_only_after_the_new_one_is_sealed(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.training.run import checkpoints

    there: list[set[str]] = []

    def sealing(checkpoint: Path) -> None:
        there.append({folder.name for folder in checkpoint.parent.iterdir()})
        seal(checkpoint)

    monkeypatch.setattr(checkpoints, "seal", sealing)
    changes = {**common(tiny_base, "lora"), "save_total_limit": 1}
    run(tmp_path / "run", **changes)
    assert there == [{"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"}, {"checkpoint-4", "checkpoint-6"}]
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["checkpoint-6"]


@pytest.mark.parametrize(
    ("algorithm", "method", "state"),
    [("sft", "adalora", "adalora.safetensors"), ("dpo", "lora", "optimizer.pt")],
)
def test_what_callbacks_add_to_a_checkpoint_is_sealed_too(
    tiny_base: Path, tmp_path: Path, algorithm: str, method: str, state: str
) -> None:
    changes = {**common(tiny_base, method), "algorithm": algorithm}
    run(tmp_path / "run", **changes)
    checkpoint = tmp_path / "run/checkpoints/checkpoint-6"
    assert state in json.loads((checkpoint / SEAL).read_text())["files"]
    truncate(checkpoint / state)
    assert (damage(checkpoint) or "").startswith(state)


def test_weights_of_the_best_evaluation_that_are_damaged_are_named(tiny_base: Path, tmp_path: Path) -> None:
    from gym_fed.data import generate

    def spoil(step: int, *_: Any) -> None:
        if step == 6:
            for file in (tmp_path / "run/best").iterdir():
                truncate(file)

    stopping = {"patience": 9, "min_delta": 100.0}  # the first evaluation stays the best
    changes = {**common(tiny_base, "lora"), "eval_steps": 2, "early_stopping": stopping}
    config = settings(tmp_path / "run", **changes)
    with pytest.raises(
        GymError, match=r"best/step-\d\.safetensors: the weights of the best evaluation"
    ) as caught:
        Trainer(config, on_step=spoil).train(ROWS, generate("copy", 4, seed=3))
    assert caught.value.code is ErrorCode.STATE_CORRUPT


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[str]]]:
    """Each sync to the disk: the file's inode, and the names in it if it is a folder."""
    syncs: list[tuple[int, set[str]]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        names = set(os.listdir(descriptor)) if Path(f"/proc/self/fd/{descriptor}").is_dir() else set()
        syncs.append((os.fstat(descriptor).st_ino, names))

    monkeypatch.setattr(os, "fsync", record)
    return syncs


def small_checkpoint(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "inner/model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open folders are read from /proc")
def test_a_checkpoint_is_sealed_only_after_each_of_its_files_and_folders_is_synced(
    tmp_path: Path, synced: list[tuple[int, set[str]]]
) -> None:
    checkpoint = small_checkpoint(tmp_path / "run/checkpoints/checkpoint-2")
    seal(checkpoint)
    order = [inode for inode, _ in synced]
    sealed = order.index((checkpoint / SEAL).stat().st_ino)
    parts = [checkpoint, *(entry for entry in checkpoint.rglob("*") if entry.name != SEAL)]
    for entry in [*parts, checkpoint.parent, checkpoint.parent.parent]:
        assert entry.stat().st_ino in order[:sealed], entry


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open folders are read from /proc")
def test_the_new_name_of_a_damaged_checkpoint_is_synced_before_the_run_resumes(
    tmp_path: Path, synced: list[tuple[int, set[str]]]
) -> None:
    for step in (2, 4):
        seal(small_checkpoint(tmp_path / f"checkpoints/checkpoint-{step}"))
    truncate(tmp_path / "checkpoints/checkpoint-4/optimizer.pt")
    with pytest.warns(RunWarning, match="checkpoint-4 is damaged"):
        assert newest_intact(tmp_path / "checkpoints") == tmp_path / "checkpoints/checkpoint-2"
    inode = (tmp_path / "checkpoints").stat().st_ino
    assert (inode, {"checkpoint-2", "damaged-checkpoint-4"}) in synced


def test_a_step_that_is_saved_again_and_killed_meanwhile_has_no_seal(
    tiny_base: Path, killed: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, folder, _ = killed
    shutil.copytree(folder, tmp_path / "again")
    checkpoints = tmp_path / "again/checkpoints"
    shutil.move(checkpoints / "checkpoint-4", tmp_path / "checkpoint-4")

    def bring_back(step: int, *_: Any) -> None:
        if step == 3:
            shutil.move(tmp_path / "checkpoint-4", checkpoints / "checkpoint-4")
            assert damage(checkpoints / "checkpoint-4") is None

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.Trainer._save_optimizer_and_scheduler", kill)
    with pytest.raises(KeyboardInterrupt):
        Trainer(settings(tmp_path / "again", **common(tiny_base, method)), on_step=bring_back).train(ROWS)
    assert (checkpoints / "checkpoint-4").is_dir()
    assert not (checkpoints / "checkpoint-4" / SEAL).exists()
    assert (checkpoints / "checkpoint-2" / SEAL).is_file()
