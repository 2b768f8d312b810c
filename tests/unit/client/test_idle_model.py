"""A contributor that waits holds no model in memory, and trains from the same tensors when a task comes."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gym_client.agent import global_model
from gym_client.agent.agent import Agent
from gym_client.agent.global_model import GlobalModel, park_idle_model
from gym_client.agent.version_sum import VersionSum

from gym_fed.core.errors import GymError
from tests.support.agent_scene import Scene, empty
from tests.support.wait import SECONDS


@pytest.fixture
def model(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> GlobalModel:
    found = GlobalModel(str(tiny_base))
    monkeypatch.setattr(global_model, "_loaded", {found.source: found})
    return found


def begin_task(model: GlobalModel, folder: Path) -> None:
    """What a task without new versions does to the model."""
    spec = SimpleNamespace(
        base_digest=model.base.digest, base_model="tiny", version_digest=model.base.digest, soups=[]
    )
    model.advance(spec, lambda sha256: folder / sha256, VersionSum(folder))  # type: ignore[arg-type]


def test_after_half_a_minute_of_waiting_no_tensor_is_in_memory_and_the_next_task_has_them_again(
    model: GlobalModel, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    some = weakref.ref(next(iter(model.tensors.values())))
    park_idle_model(tmp_path, 31.0)
    assert some() is not None, "a model that is in use stays"
    model.release()
    park_idle_model(tmp_path, 29.0)
    assert some() is not None
    park_idle_model(tmp_path, 31.0)
    assert some() is None
    assert list(tmp_path.iterdir()) == [], "the file goes with the process, whatever ends it"
    park_idle_model(tmp_path, 32.0)
    begin_task(model, tmp_path)
    assert model.tensors.keys() == before.keys()
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(model.tensors[name], before[name])


def test_a_model_stays_in_memory_if_its_tensors_cannot_be_stored(model: GlobalModel, tmp_path: Path) -> None:
    model.release()
    model.park(tmp_path / "missing")
    assert model.tensors


def test_a_file_that_cannot_be_read_makes_the_model_again_from_the_base(
    model: GlobalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    model.release()
    model.park(tmp_path)
    assert model._parked is not None
    model._parked._file.truncate(10)
    begin_task(model, tmp_path)
    assert all(torch.equal(model.tensors[name], tensor) for name, tensor in before.items())
    assert "cut short" in caplog.text


def test_an_agent_that_waits_parks_its_model(
    scene: Scene, model: GlobalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_model, "_IDLE_SECONDS", 0.0)
    model.release()
    agent: Agent = scene.agent(empty)

    def work() -> None:
        with pytest.raises(GymError, match="stopped"):
            agent.run()

    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + SECONDS
    while model.tensors:
        assert time.monotonic() < end, "it never parked"
        time.sleep(0.02)
    agent.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
