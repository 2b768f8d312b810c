"""A model folder with a missing or an extra tensor is refused by name, whichever command or class reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError

WEIGHTS = "model.safetensors"
NORM = "model.layers.0.input_layernorm.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


def altered(base: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(base, folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture
def lacking(tiny_base: Path, tmp_path: Path) -> Path:
    return altered(tiny_base, tmp_path / "lacking", lambda tensors: tensors.pop(NORM))


def surplus(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.extra.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_that_lacks_a_tensor_is_refused_by_name(lacking: Path, dtype: str) -> None:
    with pytest.raises(GymError, match=NORM) as caught:
        load_model(str(lacking), dtype=dtype)
    assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize("plain", [True, False])
def test_a_served_base_that_lacks_a_tensor_is_refused_by_name(lacking: Path, plain: bool) -> None:
    from gym_fed.serving.base import load_base

    with pytest.raises(GymError, match=NORM):
        load_base(str(lacking), [], "bfloat16", plain=plain)


def test_a_hub_is_not_made_on_a_base_that_lacks_a_tensor(lacking: Path, tmp_path: Path) -> None:
    from gym_server.cli.setup import HubChoices, init_hub

    with pytest.raises(GymError, match=NORM):
        init_hub(tmp_path / "hub", HubChoices(str(lacking), "h", "open"))
    assert not (tmp_path / "hub").exists()


def test_a_hub_is_not_made_on_a_base_with_an_extra_tensor_unless_it_is_ignored_on_request(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_server.cli.setup import HubChoices, init_hub

    folder = str(altered(tiny_base, tmp_path / "surplus", surplus))
    with pytest.raises(GymError, match=r"model\.layers\.0\.extra\.weight"):
        init_hub(tmp_path / "hub", HubChoices(folder, "h", "open"))
    assert not (tmp_path / "hub").exists()
    monkeypatch.setenv("GYM_EXTRA_TENSORS", "ignore")
    init_hub(tmp_path / "hub", HubChoices(folder, "h", "open"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["delta", "encode", "BASE", "LACKING", "-o", "new.gymdelta"],
        ["delta", "encode", "LACKING", "BASE", "-o", "new.gymdelta"],
        ["soup", "merge", "BASE", "LACKING", "--rule", "mean", "--base", "BASE", "-o", "new.gymdelta"],
        ["export", "LACKING", "-o", "new", "--skip-check"],
        ["eval", "run", "LACKING", "--data", "rows.jsonl"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_given_a_folder_that_lacks_a_tensor_names_it_and_writes_nothing(
    arguments: list[str], tiny_base: Path, lacking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    folders = {"BASE": str(tiny_base), "LACKING": str(lacking)}
    result = CliRunner().invoke(app, [folders.get(word, word) for word in arguments])
    assert isinstance(result.exception, GymError), result.output
    assert NORM in result.exception.message
    assert [path for name in ("new", "new.gymdelta") if (path := Path(name)).exists()] == []


def test_a_tensor_that_the_architecture_does_not_have_is_refused_unless_it_is_ignored_on_request(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(altered(tiny_base, tmp_path / "surplus", surplus))
    with pytest.raises(GymError, match=r"model\.layers\.0\.extra\.weight") as caught:
        load_model(folder)
    assert "GYM_EXTRA_TENSORS=ignore" in caught.value.hint
    monkeypatch.setenv("GYM_EXTRA_TENSORS", "ignore")
    load_model(folder)
    assert "model.layers.0.extra.weight" in caplog.text


def test_a_head_that_is_tied_to_the_embeddings_needs_no_tensor_and_an_untied_one_does(
    tiny_base: Path, tmp_path: Path
) -> None:
    assert "lm_head.weight" not in load_file(tiny_base / WEIGHTS)
    load_model(str(tiny_base))
    folder = tmp_path / "untied"
    shutil.copytree(tiny_base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(GymError, match=r"lm_head\.weight") as caught:
        load_model(str(folder))
    assert "tie_word_embeddings" in caught.value.hint


def test_a_reward_model_whose_score_head_is_missing_is_refused_as_a_grader(
    tiny_base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    from gym_fed.evaluation.graders.reward_model import RewardModelConfig, RewardModelGrader

    folder = tmp_path / "reward"
    AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=1).save_pretrained(folder)
    load_tokenizer(str(tiny_base)).save_pretrained(folder)
    RewardModelGrader(RewardModelConfig(grader="reward_model", model=str(folder), device="cpu")).setup()
    headless = altered(folder, tmp_path / "headless", lambda tensors: tensors.pop("score.weight"))
    with pytest.raises(GymError, match=r"score\.weight"):
        RewardModelGrader(RewardModelConfig(grader="reward_model", model=str(headless), device="cpu")).setup()
