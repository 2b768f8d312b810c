"""How a variant is trained and encoded by default, what may be set, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.personalization.recipe import FULL_BITS, BaseSize, default_steps, encoding_of, training_config
from gym_fed.personalization.rows import PersonalRows, read_rows

PAIRS = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(20)]
TEXTS = [{"text": f"t{i}"} for i in range(20)]


def spec(rows: int, cols: int) -> BaseSpec:
    shapes = {"model.embed_tokens.weight": (512, cols), "layer.weight": (rows, cols), "norm.weight": (cols,)}
    return BaseSpec("b", "sha256:" + "0" * 64, shapes)


def config(rows: PersonalRows, given: Any = None, method: Any = "lora") -> TrainingConfig:
    return training_config(method, rows, Path("run"), "gym-nano", given, BaseSize(256, 1_000_000))


def test_preferences_are_learnt_by_dpo_and_examples_by_sft() -> None:
    assert config(read_rows(PAIRS)).algorithm == "dpo"
    assert config(read_rows(TEXTS)).algorithm == "sft"
    assert config(read_rows(PAIRS), {"algorithm": "orpo"}).algorithm == "orpo"
    dpo = config(read_rows(PAIRS)).dpo
    assert dpo.loss_type == ["sigmoid", "sft"], "what is preferred is learnt, not only what is worse"
    given = config(read_rows(PAIRS), {"dpo": {"beta": 0.2, "loss_type": "sigmoid"}}).dpo
    assert (given.loss_type, given.beta) == (["sigmoid"], 0.2)
    with pytest.raises(GymError, match="algorithm sft does not train on preference rows"):
        config(read_rows(PAIRS), {"algorithm": "sft"})


def test_held_out_rows_choose_the_step_and_without_them_the_run_has_its_length() -> None:
    assert config(read_rows(TEXTS)).early_stopping is not None
    assert config(read_rows(TEXTS, held_out=0.0)).early_stopping is None
    few, many = default_steps(30, 4), default_steps(100_000, 4)
    assert few == 60
    assert many == 1000


def test_a_run_is_evaluated_some_ten_times_however_its_length_is_given() -> None:
    rows = read_rows(TEXTS)
    for given, steps in (
        ({"max_steps": 5}, 5),
        ({"max_steps": 20}, 20),
        ({"max_steps": 1000}, 1000),
        ({"num_train_epochs": 30}, 30 * 4),
        ({"num_train_epochs": 30, "gradient_accumulation_steps": 4}, 30),
    ):
        every = config(rows, given).eval_steps
        assert every
        assert min(steps, 8) <= math.ceil(steps / every) <= 15


def test_what_is_set_wins_and_what_is_not_the_users_to_set_is_refused() -> None:
    found = config(read_rows(TEXTS), {"max_steps": 7, "learning_rate": 0.5, "lora": {"r": 2}})
    assert (found.max_steps, found.learning_rate, found.lora and found.lora.r) == (7, 0.5, 2)
    assert config(read_rows(TEXTS), TrainingConfig(max_steps=9)).max_steps == 9
    for key, value in {
        "output_dir": "x",
        "finetuning": "full",
        "dtype": "bfloat16",
        "eval_split": 0.1,
    }.items():
        with pytest.raises(GymError, match=f"training: {key} cannot be set for a variant") as caught:
            config(read_rows(TEXTS), {key: value})
        assert caught.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match="learning_rat"):
        config(read_rows(TEXTS), {"learning_rat": 1})


def test_lora_keeps_its_factors_and_a_full_variant_has_one_bit_everywhere() -> None:
    lora = encoding_of("lora", "auto", None, spec(1024, 1024))
    assert lora.keeps_factors
    assert lora.policy.factors == "int4"
    full = encoding_of("full", "auto", None, spec(1024, 1024))
    assert not full.keeps_factors
    assert (full.policy.codec, full.policy.group_size, full.policy.embeddings) == (
        "bitdelta",
        "row",
        "same-row",
    )
    assert full.policy.distill_steps > 0
    merged = encoding_of("lora", "bitdelta", None, spec(1024, 1024))
    assert not merged.keeps_factors
    assert merged.policy.codec == "bitdelta"


def test_scales_are_as_fine_as_a_fifteenth_of_bfloat16_allows() -> None:
    sizes = [(4096, 4096), (4096, 256), (512, 128)]
    picked = [encoding_of("full", "auto", None, spec(*size)).policy for size in sizes]
    assert [(p.group_size, p.embeddings) for p in picked] == [
        ("row", "same-row"),
        ("tensor", "bitdelta-row"),
        ("tensor", "same-row"),
    ]
    assert FULL_BITS == 16 / 15


def test_a_codec_that_does_not_fit_is_refused_by_name() -> None:
    for method, codec, given, words in (
        ("full", "lora", None, "codec lora: a full fine-tune has no factors"),
        ("lora", "zip", None, "codec 'zip' is unknown"),
        ("lora", "auto", {"error_feedback": True}, "error_feedback needs a next round"),
        ("full", "auto", {"group": 3}, "group"),
    ):
        with pytest.raises(GymError, match=words):
            encoding_of(method, codec, given, spec(8, 8))  # type: ignore[arg-type]
    given = encoding_of("lora", "auto", CodecPolicy(factors="int8"), spec(8, 8))
    assert given.policy.factors == "int8"
    assert "factors as specified" in given.why


def test_a_variant_of_a_large_base_is_trained_at_the_rates_of_gym_train() -> None:
    rows = read_rows(TEXTS)

    def rate(method: str, weights: int) -> float:
        return training_config(method, rows, Path("run"), "m", None, BaseSize(256, weights)).learning_rate

    assert rate("lora", 135_000_000) == 2e-4
    assert rate("full", 135_000_000) == 1e-5
    assert rate("lora", 1_000_000) == 3e-3
