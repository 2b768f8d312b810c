"""LoRA with A frozen: every contributor of a round has the same A, whatever the data, and learns through B alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import LoraRecipe, TaskSpec, TrainingRecipe, check_frozen_a
from gym_fed.config.train.training import LoraSettings, TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.low_rank import LowRank, frozen_a
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import add_lora, frozen_factor, lora_factors
from tests.support.tiny_models import tiny_model

DIGEST = "sha256:" + "0" * 64
RECIPE = TrainingRecipe(
    finetuning="lora",
    lora=LoraRecipe(r=4, lora_alpha=8, freeze_a=True),
    max_steps=12,
    learning_rate=2e-2,
    per_device_train_batch_size=4,
    max_length=64,
)


def settings(folder: Path, server_round: int = 1, **changes: Any) -> TrainingConfig:
    config = round_training(RECIPE, server_round, folder, device="cpu")
    return config.model_copy(update={"num_threads": 1, **changes})


def trained(rows: list[dict[str, Any]], config: TrainingConfig) -> Any:
    loaded = load_model("gym-nano")
    return Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer).train(rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two contributors of one round; before the second trains, its global generators stand elsewhere."""
    folder = tmp_path_factory.mktemp("frozen")
    dashing = trained(generate("dash", 60), settings(folder / "dash"))
    torch.manual_seed(999)
    doubling = trained(generate("double", 80), settings(folder / "double"))
    return {"dash": dashing, "double": doubling}


@pytest.mark.parametrize("factors", ["bfloat16", "float32"])
def test_two_contributors_send_the_same_a_bit_for_bit_and_another_b(
    runs: dict[str, Any], factors: str, tmp_path: Path
) -> None:
    base = load_model("gym-nano").model
    spec = BaseSpec.of(base, "gym-nano")
    policy = CodecPolicy.model_validate({"factors": factors, "error_feedback": False})
    for name, result in runs.items():
        lora_delta(lora_factors(result.model), tmp_path / name, spec, policy=policy)
    with DeltaFile.open(tmp_path / "dash", spec) as one, DeltaFile.open(tmp_path / "double", spec) as two:
        assert one.names == two.names
        assert len(one.names) == len(lora_factors(runs["dash"].model))
        for name in one.names:
            assert torch.equal(one.payload(name)["a"], two.payload(name)["a"])
            assert not torch.equal(one.payload(name)["b"], two.payload(name)["b"])
            record = one.record(name)
            sent = [LowRank.of(file.payload(name), record) for file in (one, two)]
            assert frozen_a(sent) is not None


def test_the_loss_falls_though_only_b_learns(runs: dict[str, Any]) -> None:
    for result in runs.values():
        assert sum(result.losses[-3:]) < 0.9 * sum(result.losses[:3])
        for name, (a, b, _) in lora_factors(result.model).items():
            layer = name.removesuffix(".weight")
            assert torch.equal(a, frozen_factor(RECIPE.seed + 1, layer, *a.shape))
            assert bool(b.any())


def test_another_round_and_another_layer_have_another_a(tmp_path: Path) -> None:
    seeds = [settings(tmp_path, server_round).seed for server_round in (1, 2)]
    drawn = [frozen_factor(seed, name, 4, 32) for seed in seeds for name in ("q", "k")]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_is_spread_evenly_within_one_over_the_root_of_the_width() -> None:
    drawn = frozen_factor(0, "layer", 16, 1024) * 32
    assert float(drawn.abs().max()) <= 1.0
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(drawn.square().mean()) == pytest.approx(1 / 3, rel=0.03)


def test_the_a_of_a_seed_and_a_layer_never_changes() -> None:
    drawn = frozen_factor(3, "model.layers.0.self_attn.q_proj", 2, 2)
    assert drawn.tolist() == [
        [-0.6577572822570801, 0.2781686782836914],
        [-0.5834330916404724, 0.5220142602920532],
    ]


def test_a_run_that_is_resumed_keeps_its_a(tmp_path: Path, runs: dict[str, Any]) -> None:
    steps = iter([False, False, True])
    loaded = load_model("gym-nano")
    rows = generate("dash", 60)
    with pytest.raises(GymError, match="stopped at step 3"):
        Trainer(
            settings(tmp_path / "run"),
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            should_stop=lambda: next(steps),
        ).train(rows)
    resumed = lora_factors(trained(rows, settings(tmp_path / "run")).model)
    for name, (a, b, _) in lora_factors(runs["dash"].model).items():
        assert torch.equal(resumed[name][0], a)
        assert torch.equal(resumed[name][1], b)


def test_only_b_is_trained_with_a_frozen_and_both_without() -> None:
    for freeze in (True, False):
        adapted = add_lora(load_model("gym-nano").model, LoraSettings(freeze_a=freeze), seed=0)
        learning = {name for name, value in adapted.named_parameters() if value.requires_grad}
        factors = {name for name, _ in adapted.named_parameters() if "lora_A" in name or "lora_B" in name}
        assert learning == {name for name in factors if "lora_B" in name or not freeze}
        assert len(factors) == 2 * len(lora_factors(adapted))


def test_a_codec_that_would_write_other_factors_is_refused_with_a_frozen_a() -> None:
    with pytest.raises(ValueError, match=r"lora\.freeze_a .* codec\.factors is 'int4'.*float32"):
        check_frozen_a(RECIPE, CodecPolicy(factors="int4"))
    with pytest.raises(ValidationError, match=r"codec\.factors is 'auto'"):
        ServerConfig(recipe=RECIPE, codec=CodecPolicy(factors="auto"))
    with pytest.raises(ValidationError, match=r"codec\.factors is 'int8'"):
        TaskSpec(
            server="s0123456789abcdef",
            server_round=1,
            base_model="gym-nano",
            base_digest=DIGEST,
            version_digest=DIGEST,
            recipe=RECIPE,
            codec=CodecPolicy(factors="int8"),
            max_update_bytes=1,
            deadline_seconds=1,
        )
    check_frozen_a(RECIPE, CodecPolicy(factors="float32"))
    check_frozen_a(RECIPE.model_copy(update={"finetuning": "full"}), CodecPolicy(factors="int4"))


@pytest.mark.parametrize(
    ("model", "sizes", "targets", "message"),
    [
        (
            "llama",
            {"num_key_value_heads": 1, "head_dim": 4},
            ["q_proj", "k_proj"],
            "k_proj has 4 inputs or outputs",
        ),
        ("gpt2", {}, ["c_attn"], "c_attn is a Conv1D"),
        ("llama", {}, ["embed_tokens", "q_proj"], "embed_tokens is a Embedding"),
    ],
)
def test_a_layer_whose_frozen_a_cannot_be_sent_is_refused(
    model: str, sizes: dict[str, Any], targets: list[str], message: str
) -> None:
    with pytest.raises(GymError, match=message) as caught:
        add_lora(tiny_model(model, **sizes), LoraSettings(r=8, freeze_a=True, target_modules=targets), seed=3)
    assert f"remove {message.split()[0]} from lora.target_modules" in str(caught.value.hint)


def test_the_sent_a_of_a_layer_as_narrow_as_its_rank_is_the_frozen_one() -> None:
    narrow = tiny_model("llama", num_key_value_heads=1, head_dim=4)
    adapted = add_lora(narrow, LoraSettings(r=4, freeze_a=True, target_modules=["k_proj"]), seed=3)
    for name, (a, _, _) in lora_factors(adapted).items():
        assert torch.equal(a, frozen_factor(3, name.removesuffix(".weight"), *a.shape))
