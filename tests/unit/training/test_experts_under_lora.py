"""Mixtures of experts: adapters on fused experts, the routers' loss, and the algorithms that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.models import load_model
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.factors import lora_factors
from tests.support.adapters import logits, run, settings, sibling

EXPERTS: dict[str, dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 8},
    "Mixtral": EXPERTS,
    "GptOss": {**EXPERTS, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 16},
}
"""Changes of the sibling's config."""
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**changes: Any) -> dict[str, Any]:
    return {"lora": {"r": 2, "target_modules": ["q_proj"], "target_parameters": FUSED, **changes}}


@pytest.mark.parametrize("kind", KINDS)
def test_factors_on_fused_experts_are_trained_saved_and_merged(kind: str, tmp_path: Path) -> None:
    base = sibling(kind, tmp_path / "base", **KINDS[kind])
    result = run(tmp_path / "run", model=str(base), **lora())
    trained = {
        name: value
        for name, value in result.model.named_parameters()
        if ".experts." in name and "lora_B" in name
    }
    layers = 2 if kind == "GptOss" else 1
    assert len(trained) == 2 * layers, "one pair of factors for each of the two fused weights of a layer"
    assert all(bool(value.any()) for value in trained.values())
    assert all("aux_loss" in entry for entry in result.history[:3])
    wanted = logits(tmp_path / "run")
    assert (wanted - logits(base)).abs().max() > 1e-3
    whole = merged(load_model(str(tmp_path / "run")).model)
    torch.testing.assert_close(logits(whole), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"algorithm": "dpo"}, "rewards/margins"),
        ({"quantization": {"bits": 4}}, "aux_loss"),
        ({"finetuning": "full"}, "aux_loss"),
    ],
    ids=["dpo", "qlora", "full"],
)
def test_a_mixture_is_trained_with_its_routers_loss(
    changes: dict[str, Any], metric: str, tmp_path: Path
) -> None:
    base = sibling("Qwen3Moe", tmp_path / "base", head_dim=8)
    result = run(tmp_path / "run", model=str(base), **changes)
    assert result.losses[-1] < result.losses[0]
    assert all(metric in entry and "aux_loss" in entry for entry in result.history[:3])


def test_gspo_trains_a_mixture(tmp_path: Path) -> None:
    from gym_fed.training.trainer import Trainer

    base = sibling("Qwen3Moe", tmp_path / "base", head_dim=8)
    config = settings(
        tmp_path / "run", model=str(base), algorithm="gspo", max_steps=2,
        gspo={"num_generations": 4, "max_completion_length": 8}, graders=[{"grader": "length", "max": 4}],
    )  # fmt: skip
    result = Trainer(config).train([{"prompt": [{"role": "user", "content": "one"}]}] * 2)
    assert result.steps == 2
    assert all("reward" in entry for entry in result.history[:2])


def test_a_parameter_that_the_model_lacks_is_refused_with_the_names_of_its_experts(tmp_path: Path) -> None:
    base = sibling("Qwen3Moe", tmp_path / "base", head_dim=8)
    with pytest.raises(GymError, match=r"has no parameter 'mlp\.experts\.w1'") as caught:
        run(tmp_path / "run", model=str(base), **lora(target_parameters=["mlp.experts.w1"]))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "mlp.experts.gate_up_proj" in str(caught.value.hint)


def test_settings_that_peft_has_for_layers_only_are_refused_with_parameters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PEFT adapts parameters without lora_dropout"):
        settings(tmp_path, **lora(lora_dropout=0.1))


def test_a_rounds_update_of_a_mixture_is_factors_of_its_other_layers(tmp_path: Path) -> None:
    from gym_fed.training.trainer import Trainer
    from tests.support.adapters import ROWS

    base = load_model(str(sibling("Qwen3Moe", tmp_path / "base", head_dim=8)))
    recipe = TrainingRecipe(finetuning="lora", max_steps=1, per_device_train_batch_size=4, max_length=48)
    config = round_training(recipe, 1, tmp_path / "run", "cpu")
    result = Trainer(config, model=base.model, tokenizer=base.tokenizer).train(ROWS)
    layers = {name.split(".")[-2] for name in lora_factors(result.model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
