"""Tensors on disk come back as they were, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gym_fed.delta.parked import ParkedTensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_of_any_type_and_layout_come_back_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(12).view(3, 4).to(dtype).T,
        "scalar": torch.tensor(7).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
    }
    parked = ParkedTensors.park(tensors, tmp_path)
    assert list(tmp_path.iterdir()) == [], "the file has no name, so it ends with the process"
    assert parked is not None
    found = parked.tensors()
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].dtype == dtype for name in tensors)


@pytest.mark.parametrize(("damage", "reason"), [("cut", "cut short"), ("changed", "were changed")])
def test_tensors_of_a_damaged_file_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, reason: str
) -> None:
    parked = ParkedTensors.park({"weight": torch.ones(100)}, tmp_path)
    assert parked is not None
    if damage == "cut":
        parked._file.truncate(50)
    else:
        parked._file.seek(50)
        parked._file.write(b"x")
    assert parked.tensors() is None
    assert reason in caplog.text


def test_a_disk_with_little_room_and_one_that_fails_store_nothing_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"weight": torch.ones(100)}
    assert ParkedTensors.park(tensors, tmp_path / "missing") is None
    assert "No such file" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 400 - 1))
    with caplog.at_level("INFO"):
        assert ParkedTensors.park(tensors, tmp_path) is None
    assert "little free space" in caplog.text
