"""A full disk ends a run with its name, leaves nothing half written, and the same command resumes later."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_disk_full
from gym_fed.training.rows.preprocess import preprocess
from gym_fed.training.trainer import Trainer
from tests.support.adapters import ROWS, run, settings


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux":
        pytest.skip("a tmpfs is mounted on Linux only")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Write a file that leaves ``leave`` bytes of the disk."""
    import os

    free = os.statvfs(folder)
    file = folder / "ballast"
    file.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return file


def common(base: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(base), "finetuning": "full", "max_steps": 4, "save_steps": 2, **changes}


@pytest.mark.parametrize("leave_kib", [0, 8, 32, 64, 96])
def test_a_disk_that_is_full_at_a_checkpoint_is_named_and_the_same_command_resumes(
    tiny_base: Path, small_disk: Path, tmp_path: Path, leave_kib: int
) -> None:
    whole = run(tmp_path / "whole", **common(tiny_base))
    folder = small_disk / "run"
    ballast: list[Path] = []

    def fill_at(step: int, *_: Any) -> None:
        if step == 3:
            ballast.append(fill(small_disk, leave_kib << 10))

    config = settings(folder, **common(tiny_base))
    with pytest.raises(GymError, match="no space is left for") as caught:
        Trainer(config, on_step=fill_at).train(ROWS)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert str(folder) in caught.value.message
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["checkpoint-2"]
    ballast[0].unlink()
    steps: list[int] = []
    Trainer(config, on_step=lambda step, *_: steps.append(step)).train(ROWS)
    assert steps == [3, 4]
    expected, found = load_file(tmp_path / "whole/model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert whole.steps == 4
    assert (folder / "metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


@pytest.mark.parametrize("leave_kib", [0, 8, 24])
def test_a_disk_that_is_full_at_the_end_is_named_and_the_same_command_saves_the_model(
    tiny_base: Path, small_disk: Path, leave_kib: int
) -> None:
    folder = small_disk / "run"
    config = settings(folder, **common(tiny_base, save_strategy="no", save_steps=0))
    ballast: list[Path] = []

    def fill_at(step: int, *_: Any) -> None:
        if step == 4:
            ballast.append(fill(small_disk, leave_kib << 10))

    with pytest.raises(GymError, match="no space is left for") as caught:
        Trainer(config, on_step=fill_at).train(ROWS)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert not (folder / "model.safetensors").exists()
    assert not (folder / ".final.part").exists()
    ballast[0].unlink()
    assert Trainer(config).train(ROWS).steps == 4
    assert load_file(folder / "model.safetensors")


def test_a_disk_that_is_full_when_rows_are_tokenized_is_named(tiny_base: Path, small_disk: Path) -> None:
    config = settings(
        small_disk / "run",
        **common(tiny_base),
        data=[{"tasks": ["copy"], "num_examples": 2000}],
        tokenized_path=str(small_disk / "tokens"),
        preprocess_only=True,
    )
    ballast = fill(small_disk, 8 << 10)
    with pytest.raises(GymError, match=r"no space is left for .*tokens") as caught:
        preprocess(config)
    assert caught.value.code is ErrorCode.DISK_FULL
    ballast.unlink()
    assert preprocess(config)[0].learned == 2000


def test_a_disk_that_is_full_when_figures_are_logged_is_named_without_a_trace_of_a_thread(
    tiny_base: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ballast: list[Path] = []

    def fill_at(step: int, *_: Any) -> None:
        if step == 3:
            ballast.append(fill(small_disk, 0))

    config = settings(small_disk / "run", **common(tiny_base, save_steps=0, max_steps=2000, logging_steps=1))
    hook = threading.excepthook
    with pytest.raises(GymError, match=r"no space is left for .*run") as caught:
        Trainer(config, on_step=fill_at).train(ROWS)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is hook


def test_what_torch_raises_on_a_full_disk_is_known_as_such_and_other_errors_are_not(small_disk: Path) -> None:
    fill(small_disk, 16 << 10)
    for tensors in ({"a": torch.zeros(1 << 16)}, {str(i): torch.zeros(100) for i in range(100)}):
        with pytest.raises(RuntimeError) as caught:
            torch.save(tensors, small_disk / "a.pt")
        assert is_disk_full(caught.value)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_disk_full(other.value)
