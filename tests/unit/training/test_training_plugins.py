"""Algorithms, tuning methods, optimisers and features of an installed package, in the config and in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, FEATURES, OPTIMIZERS, TUNING
from gym_fed.data.generated import generate
from gym_fed.training.features.base import active_features
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer
from tests.support import more_training
from tests.support.installed import install

HERE = "tests.support.more_training"
POINTS = {
    "gym_fed.algorithms": {"weighed_sft": f"{HERE}:WeighedSft"},
    "gym_fed.tuning": {"norms": f"{HERE}:NormsOnly"},
    "gym_fed.optimizers": {"sign_sgd": f"{HERE}:SignSgd"},
    "gym_fed.features": {"watch": f"{HERE}:Watch", "loud": f"{HERE}:Loud"},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ALGORITHMS, TUNING, OPTIMIZERS, FEATURES):
        monkeypatch.setattr(kind, "_types", dict(kind._types))
    install(monkeypatch, POINTS)


def read(folder: Path, text: str) -> TrainingConfig:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, TrainingConfig)


def test_the_sections_of_installed_members_are_read_and_written_like_ours(tmp_path: Path) -> None:
    text = (
        "algorithm: weighed_sft\nweighed_sft: {beta: 2}\nfinetuning: norms\nwatch: {word: hello}\nloud: yes\n"
    )
    found: Any = read(tmp_path, text)
    assert (found.weighed_sft.beta, found.norms.also, found.watch.word, found.loud) == (
        2.0,
        [],
        "hello",
        True,
    )
    written = yaml.safe_load(dump_yaml(found))
    assert written["weighed_sft"] == {"beta": 2.0, "keep": True}
    assert read(tmp_path, dump_yaml(found)) == found
    assert found.model_copy(update={"seed": 3}).weighed_sft.beta == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "algorithm: weighed_sft\nweighed_sft:\n  beta: -1\n",
            "run.yaml:3:3: weighed_sft.beta: Input should be greater",
        ),
        (
            "algorithm: weighed_sft\nweighed_sft:\n  bta: 1\n",
            "3:3: weighed_sft.bta: unknown key (did you mean 'beta'?)",
        ),
        (
            "model: gym-nano\nweighed_sft: {beta: 1}\n",
            "2:1: weighed_sft: is given, but algorithm is sft; remove",
        ),
        ("norms: {}\nfinetuning: lora\n", "1:1: norms: is given, but finetuning is lora; remove the section"),
        ("watch: {}\n", "1:1: watch.word: required, but missing"),
        ("loud: 7\n", "1:1: loud: Input should be a valid boolean"),
        ("weighted_sft: {}\nalgorithm: weighed_sft\n", "1:1: weighted_sft: unknown key"),
        (
            "algorithm: weighed\n",
            "1:1: algorithm: unknown algorithm 'weighed'; did you mean 'weighed_sft'? (known: ",
        ),
    ],
)
def test_what_is_wrong_in_a_section_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(GymError) as caught:
        read(tmp_path, text)
    assert said in caught.value.message, caught.value.message


def test_several_mistakes_in_sections_of_ours_and_of_others_are_all_said(tmp_path: Path) -> None:
    text = "algorithm: weighed_sft\nweighed_sft: {beta: 0, kep: 1}\nlearning_rate: -1\nnonsense: 1\n"
    with pytest.raises(GymError) as caught:
        read(tmp_path, text)
    for place in ("2:15: weighed_sft.beta", "2:24: weighed_sft.kep", "3:1: learning_rate", "4:1: nonsense"):
        assert place in caught.value.message


def test_the_schema_names_what_is_installed_and_imports_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {group: {"elsewhere": "not_there:Thing"} for group in POINTS})
    schema = TrainingConfig.model_json_schema()
    for key in ("algorithm", "finetuning", "optimizer"):
        assert "elsewhere" in schema["properties"][key]["enum"]
    assert schema["additionalProperties"] is False
    assert "elsewhere" in schema["properties"]
    assert schema["properties"]["lora"]["anyOf"][0]["$ref"].endswith("LoraSettings")


@pytest.mark.parametrize(("key", "kind"), [("algorithm", "algorithm"), ("finetuning", "tuning method")])
def test_a_member_that_cannot_be_imported_is_refused_by_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, kind: str
) -> None:
    install(monkeypatch, {group: {"broken": "not_there:Thing"} for group in POINTS})
    with pytest.raises(GymError, match=rf"{kind} 'broken' of gym-more 1.2 cannot be imported") as caught:
        read(tmp_path, f"{key}: broken\n")
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_a_section_that_would_take_the_place_of_a_key_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, {"gym_fed.algorithms": {"seed": f"{HERE}:WeighedSft"}})
    with pytest.raises(GymError, match="'seed': gym-fed has a key of this name"):
        read(tmp_path, "algorithm: seed\n")


def test_a_run_with_members_of_a_package_alone_trains_what_they_say(tiny_base: Path, tmp_path: Path) -> None:
    more_training.SEEN.clear()
    settings: dict[str, Any] = {
        "algorithm": "weighed_sft",
        "weighed_sft": {"beta": 2.0},
        "finetuning": "norms",
        "norms": {"also": ["lm_head"]},
        "optimizer": "sign_sgd",
        "watch": {"word": "seen"},
        "loud": True,
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "learning_rate": 0.125,
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
    }
    loaded = load_model(str(tiny_base))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    trainer = Trainer(TrainingConfig(**settings), model=loaded.model, tokenizer=loaded.tokenizer)
    result = trainer.train(generate("copy", 12))
    moved = {n for n, v in loaded.model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved
    assert all("norm" in name or "lm_head" in name for name in moved)
    name = next(name for name in moved if "norm" in name)
    steps = (loaded.model.state_dict()[name] - before[name]).abs()
    assert set(steps.unique().tolist()) <= {0.0, 0.125, 0.25}  # two steps by the gradient's sign
    assert more_training.SEEN == ["loud", "seen"]
    plain = load_model(str(tiny_base))
    lone = TrainingConfig(**{**settings, "weighed_sft": {}, "output_dir": tmp_path / "other", "max_steps": 1})
    first = Trainer(lone, model=plain.model, tokenizer=plain.tokenizer).train(generate("copy", 12)).losses[0]
    assert result.losses[0] == pytest.approx(2 * first)
    kept = json.loads(
        json.dumps(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")))
    )
    assert kept["weighed_sft"]["beta"] == 2.0
    assert kept["norms"] == {"also": ["lm_head"]}


def test_a_feature_whose_key_means_something_else_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, {"gym_fed.features": {"seed": f"{HERE}:Loud"}})
    assert active_features(read(tmp_path, "model: gym-nano\nseed: 7\n")) == {}
    assert "feature 'seed' is ignored: gym-fed has a key of this name" in caplog.text


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("optimizer_args", "optimizer_args: {eps: 1e-8}"),
        ("adam_beta1", "adam_beta1: 0.8"),
        ("lora.loraplus_lr_ratio", "finetuning: lora\nlora: {loraplus_lr_ratio: 4}"),
    ],
)
def test_what_an_installed_optimiser_does_not_read_is_refused(tmp_path: Path, key: str, text: str) -> None:
    settings = read(tmp_path, f"model: gym-nano\noptimizer: sign_sgd\n{text}\n")
    with pytest.raises(GymError, match=key):
        check_config(settings)
