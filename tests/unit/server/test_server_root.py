"""The hub's own model is as it was, whatever training on the root data did or raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.root import root_update
from gym_server.rounds.round_store import MERGING, Round

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.training.run.result import TrainResult
from gym_fed.training.trainer import Trainer

FIRST = Round(1, MERGING, None, 0, [], "")


@pytest.fixture(params=["full", "lora"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices(str(tiny_base), "root", "open"))
    path = folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    values["soup"] = {"aggregator": "fltrust", "num_malicious_nodes": 1}
    values["root"] = {"data": "root.jsonl"}
    values["recipe"] = {
        "finetuning": request.param,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "max_length": 32,
    }
    path.write_text(yaml.safe_dump(values))
    row = {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "ann ann"}]}
    (folder / "root.jsonl").write_text((json.dumps(row) + "\n") * 4)
    with Federation.open(folder) as federation:
        yield federation


@pytest.fixture
def model(hub: Federation) -> HubModel:
    return HubModel(hub.base, hub.config.base_model, hub.store, hub.config.gate, hub.folder)


def copies(model: HubModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(model.model).items()}


def assert_as_it_was(model: HubModel, before: dict[str, torch.Tensor]) -> None:
    now = model_tensors(model.model)
    assert list(now) == list(before)
    assert all(torch.equal(now[name].cpu(), before[name]) for name in before)
    assert not model.model.training
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_the_model_is_as_it_was_after_training_and_trains_to_the_same_update_again(
    hub: Federation, model: HubModel
) -> None:
    before = copies(model)
    first = root_update(hub.state, hub.config, model, FIRST)
    assert first is not None
    assert_as_it_was(model, before)
    with DeltaFile.open(hub.store.local_path(first), model.spec) as update:
        assert update.norm() > 0
    assert root_update(hub.state, hub.config, model, FIRST) == first
    assert_as_it_was(model, before)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError("no memory")])
def test_training_that_raises_ends_the_round_with_a_reason_and_leaves_the_model_alone(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from transformers import Trainer as Loop

    before = copies(model)
    step = Loop.training_step

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        step(self, *args, **kwargs)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "training_step", broken)
        with pytest.raises(GymError, match=f"root data failed: {type(error).__name__}: {error}") as caught:
            root_update(hub.state, hub.config, model, FIRST)
    assert caught.value.code is ErrorCode.ROUND_ABORTED
    # adding to the frozen base under LoRA is undone too
    assert_as_it_was(model, before)
    assert not list((hub.folder / "staging").iterdir())
    assert root_update(hub.state, hub.config, model, FIRST) is not None


def test_the_model_is_trained_on_the_device_that_it_is_on(
    hub: Federation, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []
    train = Trainer.train

    def watched(self: Trainer, *args: Any, **kwargs: Any) -> TrainResult:
        devices.append(self.config.device)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", watched)
    root_update(hub.state, hub.config, model, FIRST)
    assert devices == ["cpu"]


def test_a_model_whose_parameters_were_given_other_storage_is_put_back(model: HubModel) -> None:
    before = copies(model)
    with model.borrowed(), torch.no_grad():
        model.model.to(torch.float64)  # as a move to another device: same parameters, new storage
        for parameter in model.model.parameters():
            parameter.add_(1.0)
    now = model_tensors(model.model)
    assert all(torch.equal(now[name].float(), before[name]) for name in before)
