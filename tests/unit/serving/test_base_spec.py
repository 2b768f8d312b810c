"""The identity of a base read from its files equals that of the loaded model, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.models import load_model, nano_path
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.base import spec_of_files
from gym_fed.serving.forward.plain_config import plain_config, plain_shapes
from gym_fed.serving.forward.plain_model import PlainModel
from tests.unit.serving.test_plain_model import HELD, saved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HELD)
def test_the_files_describe_the_base_as_the_loaded_model_does(tmp_path: Path, name: str, dtype: str) -> None:
    folder = saved(tmp_path, name, dtype)
    found = spec_of_files(folder, "a name")
    assert found is not None
    assert found == BaseSpec.of(load_model(str(folder)).model, "a name")
    assert list(found.shapes) == sorted(found.shapes)


def test_gym_nano_is_described_by_its_files() -> None:
    assert spec_of_files(nano_path(), "gym-nano") == BaseSpec.of(load_model("gym-nano").model, "gym-nano")


@pytest.mark.parametrize("name", HELD)
def test_the_shapes_of_a_config_are_those_of_its_model(tmp_path: Path, name: str) -> None:
    config = plain_config(saved(tmp_path, name))
    assert config is not None
    with torch.device("meta"):
        model = PlainModel(config)
    assert plain_shapes(config) == {key: tuple(one.shape) for key, one in model.named_parameters()}


@pytest.mark.parametrize(
    "change", ["a tensor less", "a tensor more", "another shape", "another type", "cut", "config"]
)
def test_files_that_do_not_show_the_whole_model_are_left_to_its_loading(tmp_path: Path, change: str) -> None:
    folder = saved(tmp_path, "llama")
    assert spec_of_files(folder, "x") is not None
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change == "a tensor less":
        del tensors["model.norm.weight"]
    elif change == "a tensor more":
        tensors["more"] = torch.ones(1)
    elif change == "another shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    elif change == "another type":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float64)
    save_file(tensors, file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    if change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert spec_of_files(folder, "x") is None


def test_torch_is_not_needed() -> None:
    program = """
import sys
from gym_fed.base.models import nano_path
from gym_fed.serving.base import spec_of_files
assert spec_of_files(nano_path(), "gym-nano").num_parameters
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
