"""What a recipe in Python stands on: devices, roles of models, a tracker, and storage that never overwrites."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.recipe import RecipeContext
from gym_fed.training.trainer import Trainer


class RecordingExperiment:
    """An experiment that remembers."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[str] = []

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_artifacts(self, paths: Sequence[str | Path]) -> None:
        self.artifacts += [Path(path).name for path in paths]


def context(folder: Path, **keys: Any) -> RecipeContext:
    return RecipeContext(folder, **{"devices": "cpu", **keys})


def test_an_experiment_that_is_handed_in_gets_everything(tmp_path: Path) -> None:
    recorded = RecordingExperiment()
    with context(tmp_path, experiment=recorded, seed=3) as recipe:
        recipe.track({"reward": 0.5}, step=1)
        recipe.save_safely("notes.txt", "x")
    assert recorded.config == {"seed": 3, "devices": ["cpu"]}
    assert recorded.metrics == [(1, {"reward": 0.5})]
    assert recorded.artifacts == ["notes.txt"]


def test_by_default_figures_go_to_the_output_folder(tmp_path: Path) -> None:
    with context(tmp_path) as recipe:
        recipe.track({"reward": 0.25}, step=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("reward") == 0.25 for line in lines)


def test_the_seed_decides_what_is_drawn(tmp_path: Path) -> None:
    def drawn(seed: int) -> float:
        with context(tmp_path, experiment=RecordingExperiment(), seed=seed):
            return float(torch.rand(()))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_devices_are_there_or_refused(tmp_path: Path) -> None:
    assert context(tmp_path).devices == [torch.device("cpu")]
    assert context(tmp_path, devices=["cpu", "cpu"]).devices == [torch.device("cpu")] * 2
    assert context(tmp_path, devices="auto").devices
    for wrong in ("tpu", "cuda:99", []):
        with pytest.raises(GymError) as info:
            context(tmp_path, devices=wrong)
        assert info.value.code is ErrorCode.USAGE


def trainable(model: Any) -> set[bool]:
    return {weights.requires_grad for weights in model.parameters()}


def test_roles_are_models_of_their_own(tiny_base: Path, tmp_path: Path) -> None:
    recipe = context(tmp_path, experiment=RecordingExperiment())
    policy = recipe.spawn("policy", model=str(tiny_base))
    reference = recipe.spawn("reference", model=policy)
    value = recipe.spawn("value", model=policy)
    assert trainable(policy.model) == {True}
    assert trainable(reference.model) == {False}
    assert trainable(value.model) == {True}
    ids = torch.tensor([[5, 6, 7, 8]])
    before = reference.model(input_ids=ids).logits.clone()
    values = value.model(ids, torch.ones_like(ids), 3)
    assert values.shape == (1, 3)
    with torch.no_grad():
        for weights in policy.model.parameters():
            weights.add_(1.0)
    assert torch.equal(reference.model(input_ids=ids).logits, before)
    assert not torch.equal(policy.model(input_ids=ids).logits, before)
    assert torch.equal(value.model(ids, torch.ones_like(ids), 3), values)
    with pytest.raises(GymError, match="unknown role 'critic'"):
        recipe.spawn("critic", model=policy)  # type: ignore[arg-type]


def test_of_an_adapter_the_adapter_alone_is_trained(tiny_base: Path, tmp_path: Path) -> None:
    settings = TrainingConfig(
        model=str(tiny_base), finetuning="lora", max_steps=1, output_dir=tmp_path / "run", device="cpu"
    )
    Trainer(settings).train(generate("copy", 8))
    policy = context(tmp_path, experiment=RecordingExperiment()).spawn("policy", model=str(tmp_path / "run"))
    learning = {name for name, weights in policy.model.named_parameters() if weights.requires_grad}
    assert learning
    assert all("lora_" in name for name in learning)


def test_what_is_saved_is_never_overwritten(tmp_path: Path) -> None:
    recipe = context(tmp_path, experiment=RecordingExperiment())
    places = [recipe.save_safely("a.bin", bytes([number])) for number in range(3)]
    assert [place.name for place in places] == ["a.bin", "a-2.bin", "a-3.bin"]
    assert [place.read_bytes() for place in places] == [b"\0", b"\1", b"\2"]
    again = context(tmp_path, experiment=RecordingExperiment())
    assert again.save_safely("a.bin", b"later").name == "a-4.bin"
    assert places[0].read_bytes() == b"\0"


def test_models_texts_and_tensors_are_saved_so_that_they_can_be_read_again(
    tiny_base: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    recipe = context(tmp_path, experiment=RecordingExperiment())
    policy = recipe.spawn("policy", model=str(tiny_base))
    first, second = recipe.save_safely("policy", policy), recipe.save_safely("policy", policy)
    assert (first.name, second.name) == ("policy", "policy-2")
    read = load_model(str(second)).model.state_dict()
    assert all(torch.equal(value, read[name]) for name, value in policy.model.state_dict().items())
    value = recipe.save_safely("value", recipe.spawn("value", model=policy).model)
    assert (value / "value_head.safetensors").is_file()
    tensors = recipe.save_safely("t.safetensors", {"x": torch.arange(4).reshape(2, 2).T})
    assert torch.equal(load_file(tensors)["x"], torch.arange(4).reshape(2, 2).T)
    assert recipe.save_safely("notes.txt", "grüß").read_text(encoding="utf-8") == "grüß"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="is not a valid file name"):
        context(tmp_path, experiment=RecordingExperiment()).save_safely(name, b"x")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half").write_text("x")
            raise OSError("no space left")

    recipe = context(tmp_path, experiment=RecordingExperiment())
    with pytest.raises(OSError, match="no space left"):
        recipe.save_safely("model", Broken())
    with pytest.raises(GymError, match="cannot write int"):
        recipe.save_safely("number", 3)
    assert list(recipe.storage.iterdir()) == []


DIES = """
import os, signal, sys
from pathlib import Path
from gym_fed.training.recipe import RecipeContext

class Dies:
    def save_pretrained(self, folder):
        (Path(folder) / "half").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)

RecipeContext(sys.argv[1], devices="cpu", experiment=object()).save_safely("model", Dies())
"""


def test_a_kill_while_saving_leaves_no_torn_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert all(place.name.startswith(".") for place in (tmp_path / "storage").iterdir())
    assert context(tmp_path, experiment=RecordingExperiment()).save_safely("model", b"whole").name == "model"
