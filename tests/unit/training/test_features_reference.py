"""What acts while training alone must not come between a policy and the reference that it is compared with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.features.base import reference_mode
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer

PAIRS = [
    {"prompt": f"copy: w{i} and some more words", "chosen": f" W{i}" * 4, "rejected": f" w{i}" * 4}
    for i in range(4)
]
SHIFT = {"shift_attention": {"group_size_ratio": 0.25}}
ROUTED = {"mixture_of_depths": {"capacity": 0.5}}
NOISE = {"neftune_noise_alpha": 20.0}
LORA = {"finetuning": "lora"}
ON_POLICY = {"algorithm": "distillation", "distillation": {"teacher": "gym-nano", "lmbda": 0.5}}


def config(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**{"model": "gym-nano", "device": "cpu", "num_threads": 1, **changes})


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "tdpo", "npo"])
def test_a_reference_that_attends_or_routes_otherwise_is_refused(algorithm: str) -> None:
    for feature, words in ((SHIFT, "uses full attention"), (ROUTED, "would route different tokens")):
        with pytest.raises(GymError, match=f"the reference of {algorithm} {words}") as caught:
            check_config(config(algorithm=algorithm, **feature))
        assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_routers_that_the_model_has_already_are_refused_too(tmp_path: Path) -> None:
    loaded = load_model("gym-nano")
    convert_to_mixture_of_depths(loaded.model, capacity=0.5, every=2, router_loss_weight=0.01)
    for algorithm in ("dpo", "reward_model"):
        settings = config(algorithm=algorithm, output_dir=tmp_path / "run")
        trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
        with pytest.raises(GymError, match="model: a mixture of depths") as caught:
            trainer.train(PAIRS)
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "tdpo"])
def test_noise_in_the_reference_is_refused_and_noise_in_the_policy_alone_is_not(algorithm: str) -> None:
    with pytest.raises(GymError, match=f"the reference of {algorithm} is this model without its adapter"):
        check_config(config(algorithm=algorithm, **NOISE, **LORA))
    check_config(config(algorithm=algorithm, **NOISE))
    check_config(config(algorithm="npo", **NOISE, **LORA))


@pytest.mark.parametrize("feature", [SHIFT, ROUTED, NOISE], ids=["shift", "depths", "noise"])
def test_a_student_that_answers_itself_is_refused_what_its_answers_would_have(
    feature: dict[str, Any],
) -> None:
    with pytest.raises(
        GymError, match=r"distillation (generates its answers|would generate its|needs a model that runs)"
    ):
        check_config(config(**ON_POLICY, **feature))
    check_config(config(**{**ON_POLICY, "distillation": {"teacher": "gym-nano"}}, **feature))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"algorithm": "orpo"}, None),
        ({"algorithm": "dpo"}, "evaluation"),
        ({"algorithm": "dpo", "dpo": {"precompute_ref_log_probs": False}}, "evaluation"),
        ({"algorithm": "dpo", "finetuning": "freeze"}, "evaluation"),
        ({"algorithm": "dpo", **LORA}, "training"),
        ({"algorithm": "kto", "finetuning": "oft"}, "training"),
        ({"algorithm": "dpo", **LORA, "dpo": {"precompute_ref_log_probs": True}}, "evaluation"),
        ({"algorithm": "dpo", **LORA, "lora": {"init_lora_weights": "pissa"}}, "either"),
        ({"algorithm": "npo", **LORA}, "evaluation"),
    ],
)
def test_how_a_reference_is_asked_follows_from_the_config(changes: dict[str, Any], mode: str | None) -> None:
    assert reference_mode(config(**changes)) == mode


@pytest.mark.parametrize(
    ("algorithm", "nothing_learnt"), [("dpo", math.log(2)), ("tdpo", math.log(2)), ("kto", 0.5)]
)
def test_under_an_adapter_the_reference_attends_in_groups_as_the_policy_does(
    tiny_base: Path, tmp_path: Path, algorithm: str, nothing_learnt: float
) -> None:
    settings = config(
        model=str(tiny_base),
        algorithm=algorithm,
        output_dir=tmp_path / "run",
        max_steps=1,
        per_device_train_batch_size=2,
        max_length=64,
        save_final=False,
        **SHIFT,
        **LORA,
    )
    assert Trainer(settings).train(PAIRS).losses == pytest.approx([nothing_learnt], abs=1e-4)
