"""A run of a large pre-trained model chooses what the user leaves open, prints it, stores it and keeps it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gym_fed.base.models import load_tokenizer
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.train.defaults import LARGE
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.defaults import Defaults, with_defaults
from gym_fed.training.planning.plan import steps_of
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 24)


@pytest.fixture(scope="module")
def large_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 14 million random weights with gym-nano's tokenizer: above the limit, and quick to train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer("gym-nano")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    assert sum(value.numel() for value in model.parameters()) > LARGE
    folder = tmp_path_factory.mktemp("large")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config(base: Path, folder: Path, **changes: Any) -> TrainingConfig:
    return TrainingConfig(
        **{"model": str(base), "output_dir": folder, "device": "cpu", "num_threads": 1, **changes}
    )


def test_the_chosen_values_are_printed_with_reasons_and_stored(
    large_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Trainer(config(large_base, tmp_path / "run", max_steps=2)).train(ROWS)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    printed = capsys.readouterr().err

    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert result.steps == 2
    assert stored["finetuning"] == "lora"
    assert stored["learning_rate"] == 2e-4
    assert stored["lr_scheduler_type"] == "cosine"
    assert stored["max_length"] == 256
    assert stored["per_device_train_batch_size"] == 2
    for key in ("finetuning", "learning_rate", "max_length", "per_device_train_batch_size"):
        assert f"  {key} " in printed
    assert "an adapter keeps what it knows" in printed


def test_values_of_the_user_are_not_touched(large_base: Path, tmp_path: Path) -> None:
    given = {"finetuning": "full", "learning_rate": 3e-3, "max_length": 64, "per_device_train_batch_size": 3}
    trainer = Trainer(config(large_base, tmp_path / "run", max_steps=1, **given))
    trainer.train(ROWS)

    assert {key: getattr(trainer.config, key) for key in given} == given


def test_a_run_that_was_stopped_resumes_with_what_it_chose(
    large_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(large_base, tmp_path / "run", max_steps=3, save_steps=1)
    with pytest.raises(GymError) as stopped:
        Trainer(settings, should_stop=lambda: True).train(ROWS)
    assert stopped.value.code is ErrorCode.INTERRUPTED
    # A machine with hardly any memory would choose otherwise.
    monkeypatch.setattr("gym_fed.training.planning.plan.available_bytes", lambda device: 1)
    resumed = Trainer(settings)
    result = resumed.train(ROWS)

    assert result.steps == 3
    assert resumed.config.per_device_train_batch_size == 2


def test_little_memory_makes_small_batches(
    large_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.training.planning.plan.available_bytes", lambda device: 1)
    trainer = Trainer(config(large_base, tmp_path / "run", max_steps=1))
    trainer.train(ROWS)

    assert trainer.config.per_device_train_batch_size == 1
    assert trainer.config.gradient_checkpointing
    assert trainer.config.base_dtype == "bfloat16"


def test_a_model_in_memory_gets_the_same_defaults(large_base: Path, tmp_path: Path) -> None:
    from gym_fed.base.models import load_model

    loaded = load_model(str(large_base))
    trainer = Trainer(
        config(large_base, tmp_path / "run", max_steps=1), model=loaded.model, tokenizer=loaded.tokenizer
    )
    trainer.train(ROWS)

    assert trainer.config.finetuning == "lora"
    assert trainer.config.learning_rate == 2e-4


def test_a_model_in_memory_without_a_name_is_trained_too(large_base: Path, tmp_path: Path) -> None:
    from gym_fed.base.models import load_model

    loaded = load_model(str(large_base))
    settings = TrainingConfig(output_dir=tmp_path / "run", max_steps=1, device="cpu", num_threads=1)
    trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
    trainer.train(ROWS)

    assert trainer.config.finetuning == "lora"


def test_the_rounds_of_a_hub_are_trained_by_the_recipe_alone(large_base: Path, tmp_path: Path) -> None:
    recipe = round_training(
        TrainingRecipe(max_steps=1, learning_rate=1e-3), 1, tmp_path / "run", device="cpu"
    )
    settings = recipe.model_copy(update={"model": str(large_base)})
    defaults = Defaults(settings)
    chosen = defaults.for_rows(defaults.for_method(settings), None, ROWS)

    assert defaults.is_large
    assert defaults.chosen == []
    assert chosen == settings


@pytest.mark.parametrize(
    ("given", "warns"), [({"learning_rate": 5e-3}, True), ({"learning_rate": 1e-3}, False), ({}, False)]
)
def test_a_rate_far_above_the_usual_one_is_reported_before_the_model_is_loaded(
    large_base: Path, tmp_path: Path, given: dict[str, Any], warns: bool
) -> None:
    settings = config(large_base, tmp_path / "run", max_steps=1, **given)
    defaults = Defaults(settings, check=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        defaults.for_rows(defaults.for_method(settings), None, ROWS)

    expected = "learning_rate 0.005 is 25 times the usual 0.0002 for lora under sft"
    assert sum(expected in str(one.message) for one in caught) == warns


def test_gym_nano_keeps_its_values(tmp_path: Path) -> None:
    trainer = Trainer(config(Path("gym-nano"), tmp_path / "run", max_steps=1))
    trainer.train(ROWS)

    assert trainer.config.finetuning == "full"
    assert trainer.config.learning_rate == 1e-3
    assert not trainer.config.eval_split


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "reward_model"])
def test_rows_of_preferences_are_measured_with_their_answers(
    algorithm: str, large_base: Path, tmp_path: Path
) -> None:
    answer = "abc " * 120
    pair = {
        "prompt": [{"role": "user", "content": "double: ab"}],
        "chosen": [{"role": "assistant", "content": answer}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    settings = config(large_base, tmp_path / "run", algorithm=algorithm)
    one = {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True}
    row = one if algorithm == "kto" else pair
    defaults = Defaults(settings)
    chosen = defaults.for_rows(defaults.for_method(settings), None, [row] * 8)

    assert chosen.max_length == 512
    assert chosen.num_train_epochs == 3


def test_a_plan_is_of_what_the_run_would_choose(large_base: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' * 24, encoding="utf-8")
    planned = with_defaults(config(large_base, tmp_path / "run", data=[{"path": str(file)}]))

    assert planned.finetuning == "lora"
    assert planned.per_device_train_batch_size * planned.gradient_accumulation_steps == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("check", [True, False])
def test_a_plan_has_as_many_steps_as_the_run(check: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [f'{{"prompt": "{number}", "completion": "b"}}\n' for number in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    settings = config(Path("gym-nano"), tmp_path / "run", data=[{"path": str(file)}])
    result = Trainer(settings, check=check).train()

    assert steps_of(with_defaults(settings, check=check)) == result.steps < 41 - 10 * check


def test_a_plan_without_rows_leaves_their_keys_open(large_base: Path, tmp_path: Path) -> None:
    planned = with_defaults(config(large_base, tmp_path / "run", data=[{"name": "gsm8k"}]))

    assert planned.finetuning == "lora"
    assert "max_length" not in planned.model_fields_set


def test_a_row_without_anything_to_learn_does_not_stop_the_choice(large_base: Path, tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"%s}]}\n'
    file = tmp_path / "rows.jsonl"
    file.write_text(row % "" * 24 + row % ', "weight": 0', encoding="utf-8")
    planned = with_defaults(config(large_base, tmp_path / "run", data=[{"path": str(file)}]))

    assert planned.max_length == 256
