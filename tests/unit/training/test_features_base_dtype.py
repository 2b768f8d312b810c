"""``base_dtype``: frozen weights in 16 bits under trained ones in float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.evaluation import heldout_loss
from gym_fed.training.trainer import Trainer
from tests.support.preferences import capitals
from tests.support.tuning_cases import METHODS, ROWS, config, train
from tests.unit.training.test_algorithms_rl import ROWS as PROMPTS
from tests.unit.training.test_algorithms_rl import Letters
from tests.unit.training.test_algorithms_rl import config as rl_config

ADAPTERS = sorted(set(METHODS) - {"full", "freeze"})


def split(model: Any) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Types of the trained and of the frozen weights."""
    trained = {value.dtype for value in model.parameters() if value.requires_grad}
    return trained, {value.dtype for value in model.parameters() if not value.requires_grad}


@pytest.mark.few(3, "one path for every adapter")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_in_float32_learns_on_a_base_in_bfloat16(
    tiny_base: Path, tmp_path: Path, name: str
) -> None:
    settings = {"finetuning": name, **METHODS[name], "base_dtype": "bfloat16"}
    result = train(tiny_base, tmp_path / "run", **settings)
    assert split(result.model) == ({torch.float32}, {torch.bfloat16})
    plain, again = load_model(str(tiny_base)), load_model(str(tmp_path / "run"))
    before = heldout_loss(plain.model, plain.tokenizer, ROWS)
    assert heldout_loss(again.model, again.tokenizer, ROWS) < before - 0.005
    weights = load_file(tmp_path / "run/adapter_model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_the_base_takes_half_the_bytes(tiny_base: Path, tmp_path: Path) -> None:
    def frozen_bytes(**keys: Any) -> int:
        run = train(tiny_base, tmp_path / str(len(keys)), finetuning="lora", max_steps=1, **keys)
        return sum(v.numel() * v.element_size() for v in run.model.parameters() if not v.requires_grad)

    assert 2 * frozen_bytes(base_dtype="bfloat16") == frozen_bytes()


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_whole_modules_that_are_trained_are_in_float32_too(
    tiny_base: Path, tmp_path: Path, mixed: str
) -> None:
    whole = {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}
    settings = {"finetuning": "lora", "lora": whole, "base_dtype": "bfloat16", "learning_rate": 2e-2}
    result = train(tiny_base, tmp_path / "run", **settings, mixed_precision=mixed)
    assert split(result.model) == ({torch.float32}, {torch.bfloat16})
    assert heldout_loss(result.model, result.tokenizer, ROWS) < result.losses[0] - 0.05
    before = load_model(str(tiny_base)).model.model.norm.weight
    weights = load_file(tmp_path / "run/adapter_model.safetensors")
    (norm,) = (value for name, value in weights.items() if name.endswith("model.norm.weight"))
    assert norm.dtype is torch.float32
    assert not torch.equal(norm, norm.bfloat16().float()), "full steps"
    assert not torch.equal(norm, before)


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_what_is_not_quantised_of_a_base_in_4_bits_has_that_type(tiny_base: Path, tmp_path: Path) -> None:
    result = train(
        tiny_base, tmp_path / "run", finetuning="lora", quantization={}, base_dtype="bfloat16", max_steps=2
    )
    assert split(result.model) == ({torch.float32}, {torch.bfloat16, torch.uint8})


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_other_losses_learn_on_such_a_base(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    settings = config(
        tmp_path, model=str(tiny_base), algorithm=algorithm, finetuning="lora", base_dtype="bfloat16",
        learning_rate=2e-2,
    )  # fmt: skip
    result = Trainer(settings).train(capitals(16, 0))
    assert split(result.model) == ({torch.float32}, {torch.bfloat16})
    assert result.losses[-1] < result.losses[0] - 0.02


def test_the_critic_of_ppo_is_trained_in_float32(tiny_base: Path, tmp_path: Path) -> None:
    settings = rl_config(
        tmp_path,
        "ppo",
        model=str(tiny_base),
        finetuning="lora",
        base_dtype="bfloat16",
        save_final=True,
        max_steps=1,
    )
    result = Trainer(settings, graders=[Letters()]).train(PROMPTS * 2)
    assert split(result.model) == ({torch.float32}, {torch.bfloat16})
    critic = load_file(tmp_path / "critic/model.safetensors")
    assert {value.dtype for value in critic.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "full fine-tuning freezes none"),
        ({"finetuning": "freeze"}, "finetuning: freeze has no adapter"),
        ({"finetuning": "lora", "lora": {"bias": "all"}}, "would also apply to the base's biases"),
        (
            {"finetuning": "lora", "privacy": {"target_epsilon": 8}},
            "base_dtype: not tested with per-example gradients",
        ),
    ],
)
def test_a_base_type_without_a_frozen_base_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymError, match=problem):
        Trainer(TrainingConfig(model="gym-nano", base_dtype="bfloat16", **keys))


def test_a_model_in_memory_of_another_type_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    settings = config(tmp_path, finetuning="lora", base_dtype="bfloat16")
    with pytest.raises(GymError, match="base_dtype: bfloat16 is set, but the model in memory is float32"):
        Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
