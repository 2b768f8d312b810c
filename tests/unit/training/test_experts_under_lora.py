"""Mixtures of experts: adapters on fused experts, the routers' loss, and the algorithms that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.models import load_model
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe
from gym_fed.config.train.tuning import LoraSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.factors import lora_factors
from gym_fed.training.tuning.lora import add_lora
from tests.support.adapters import logits, run, settings, sibling
from tests.support.quick import quick
from tests.support.tiny_models import tiny_model

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


@pytest.mark.parametrize("kind", quick(KINDS, "Qwen3Moe", "GptOss"))
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


def test_a_parameter_that_is_no_matrix_is_refused_with_its_shape() -> None:
    chosen = LoraSettings(target_parameters=["input_layernorm.weight"])
    with pytest.raises(
        GymError, match=r"'input_layernorm\.weight' .* has the shape \(64,\), so it is not a matrix"
    ):
        add_lora(tiny_model("qwen3_moe"), chosen, seed=0)


LAYERS_ONLY: list[dict[str, Any]] = [
    {"lora_dropout": 0.1},
    {"use_dora": True},
    {"freeze_a": True},
    *({"init_lora_weights": start} for start in ("pissa", "pissa_niter_2", "olora", "orthogonal", "loftq")),
]
"""Settings that PEFT has for layers only."""


@pytest.mark.parametrize("changes", LAYERS_ONLY, ids=str)
def test_settings_that_peft_has_for_layers_only_are_refused_with_parameters(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"PEFT does not support {name} for parameters"):
        settings(tmp_path, **lora(**changes))


@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj", "up_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("changes", LAYERS_ONLY, ids=str)
def test_settings_that_peft_has_for_layers_only_are_refused_where_targets_become_parameters(
    changes: dict[str, Any], targets: list[str] | str
) -> None:
    (name,) = changes
    chosen = LoraSettings(r=2, target_modules=targets, **changes)
    with pytest.raises(GymError, match=rf"lora\.{name}: PEFT does not support it for parameters") as caught:
        add_lora(tiny_model("qwen3_moe"), chosen, seed=0)
    assert "lora.fused_experts: false" in str(caught.value.hint)


@pytest.mark.parametrize("changes", LAYERS_ONLY, ids=str)
def test_the_remedy_of_that_refusal_works(changes: dict[str, Any]) -> None:
    add_lora(tiny_model("qwen3_moe"), LoraSettings(r=2, fused_experts=False, **changes), seed=0)


def test_a_rank_for_some_layers_is_accepted_where_all_linear_includes_experts() -> None:
    adapted = add_lora(tiny_model("qwen3_moe"), LoraSettings(r=2, rank_pattern={"q_proj": 4}), seed=0)
    ranks = {
        name.split(".")[-4]: len(value)
        for name, value in adapted.named_parameters()
        if "attn" in name and "lora_A" in name
    }
    assert ranks == {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 2}


def test_experts_named_in_a_rounds_recipe_are_refused_before_training(tmp_path: Path) -> None:
    named = LoraRecipe(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    chosen = round_training(TrainingRecipe(finetuning="lora", lora=named), 1, tmp_path, "cpu").lora
    assert chosen is not None
    with pytest.raises(
        GymError, match=r"target_modules includes down_proj, gate_up_proj of Qwen3Moe"
    ) as caught:
        add_lora(tiny_model("qwen3_moe"), chosen, seed=0)
    assert "all-linear" in str(caught.value.hint)


def test_one_of_two_layers_that_are_fused_is_refused_with_the_other() -> None:
    with pytest.raises(GymError, match=r"lora\.target_modules: .*gate_proj without also targeting up_proj"):
        add_lora(tiny_model("qwen3_moe"), LoraSettings(target_modules=["gate_proj"]), seed=0)


def test_a_rounds_update_of_a_mixture_is_factors_of_its_other_layers(tmp_path: Path) -> None:
    from gym_fed.training.trainer import Trainer
    from tests.support.adapters import ROWS

    base = load_model(str(sibling("Qwen3Moe", tmp_path / "base", head_dim=8)))
    recipe = TrainingRecipe(finetuning="lora", max_steps=1, per_device_train_batch_size=4, max_length=48)
    config = round_training(recipe, 1, tmp_path / "run", "cpu")
    result = Trainer(config, model=base.model, tokenizer=base.tokenizer).train(ROWS)
    layers = {name.split(".")[-2] for name in lora_factors(result.model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
