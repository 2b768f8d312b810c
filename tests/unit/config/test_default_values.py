"""Defaults that follow from model, method, rows and memory: the rules alone, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from gym_fed.config.train.defaults import (
    LARGE,
    RowFacts,
    applied,
    as_given,
    in_words,
    method_defaults,
    row_defaults,
    rows_per_step,
    split_default,
)
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS, TUNING

SMOLLM2 = 134_515_008
GIB = 1 << 30


def chosen(config: TrainingConfig, weights: int = SMOLLM2, **more: Any) -> dict[str, Any]:
    return {one.key: one.value for one in method_defaults(config, weights, **more)}


def for_rows(
    config: TrainingConfig,
    num_rows: int,
    longest: int = 100,
    context: int | None = 8192,
    needs: float = 0.0,
    usual: int = 0,
) -> dict[str, Any]:
    """``needs`` is the memory of one row of a batch, in GiB, on a machine with 10 GiB."""
    config = applied(config, method_defaults(config, SMOLLM2))

    def peak(tried: TrainingConfig) -> float:
        share = 0.5 if tried.gradient_checkpointing else 1.0
        share *= 0.5 if tried.base_dtype == "bfloat16" else 1.0
        return needs * share * tried.per_device_train_batch_size * GIB

    facts = RowFacts(num_rows, longest, usual or longest, context)
    return {one.key: one.value for one in row_defaults(config, facts, peak, 10 * GIB)}


def test_a_large_pre_trained_model_gets_an_adapter_with_warm_up_and_cosine() -> None:
    found = chosen(TrainingConfig(model="m"))

    assert found == {
        "finetuning": "lora",
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
    }
    assert (
        applied(TrainingConfig(model="m"), method_defaults(TrainingConfig(model="m"), SMOLLM2)).lora
        is not None
    )


def test_every_default_has_a_reason() -> None:
    assert all(one.reason for one in method_defaults(TrainingConfig(model="m"), SMOLLM2))


@pytest.mark.parametrize("weights", [260_000, LARGE])
def test_a_small_model_keeps_the_values_of_the_schema(weights: int) -> None:
    assert chosen(TrainingConfig(model="m"), weights) == {}


def test_a_model_from_random_weights_keeps_the_values_of_the_schema() -> None:
    sizes = {
        "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    assert chosen(TrainingConfig(model_init=sizes)) == {}


def test_full_tuning_on_request_has_a_low_rate() -> None:
    found = chosen(TrainingConfig(model="m", finetuning="full"))

    assert "finetuning" not in found
    assert 1e-5 <= found["learning_rate"] <= 2e-5


def test_what_the_user_gives_is_never_chosen() -> None:
    given = TrainingConfig(
        model="m", finetuning="full", learning_rate=3e-3, lr_scheduler_type="linear", warmup_steps=1
    )
    assert chosen(given) == {}


def test_a_config_whose_keys_count_as_given_is_left_alone() -> None:
    config = as_given(TrainingConfig(model="m"))

    assert chosen(config) == {}
    assert for_rows(config, 1000) == {}


@pytest.mark.parametrize("scheduler", ["constant"])
def test_a_constant_schedule_gets_no_warm_up_that_it_would_refuse(scheduler: str) -> None:
    config = TrainingConfig(model="m", lr_scheduler_type=scheduler)
    assert "warmup_ratio" not in chosen(config)


def test_an_optimizer_of_whole_weights_is_not_given_an_adapter() -> None:
    found = chosen(TrainingConfig(model="m", optimizer="badam"))

    assert found["finetuning"] == "full"
    assert found["learning_rate"] <= 2e-5


def test_mixture_of_depths_is_not_given_an_adapter() -> None:
    assert chosen(TrainingConfig(model="m", mixture_of_depths={}))["finetuning"] == "full"


def test_dpo_learns_at_a_quarter_of_the_rate() -> None:
    assert chosen(TrainingConfig(model="m", algorithm="dpo"))["learning_rate"] == pytest.approx(5e-5)


@pytest.mark.parametrize("algorithm", ["dpo", "simpo", "orpo", "kto", "tdpo", "grpo", "gspo", "rloo", "ppo"])
@pytest.mark.parametrize("model", ["m", "gym-nano"])
def test_a_small_pre_trained_model_learns_preferences_and_rewards_at_a_tenth_of_the_schemas_rate(
    algorithm: str, model: str
) -> None:
    assert chosen(TrainingConfig(model=model, algorithm=algorithm), 260_000) == {
        "learning_rate": pytest.approx(1e-4)
    }


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "reward_model"},
        {"algorithm": "dpo", "learning_rate": 1e-3},
        {"algorithm": "dpo", "finetuning": "lora"},
        {"algorithm": "dpo", "optimizer": "sgd"},
    ],
)
def test_other_runs_of_a_small_model_keep_the_values_of_the_schema(given: dict[str, Any]) -> None:
    assert chosen(TrainingConfig(**{"model": "m", **given}), 260_000) == {}


@pytest.mark.parametrize("algorithm", ["simpo", "kto", "grpo"])
def test_preferences_and_rewards_are_learned_at_a_fraction_of_the_rate(algorithm: str) -> None:
    assert chosen(TrainingConfig(model="m", algorithm=algorithm))["learning_rate"] == pytest.approx(1e-5)


def test_the_rate_follows_the_optimizer() -> None:
    assert chosen(TrainingConfig(model="m", optimizer="lion"))["learning_rate"] == pytest.approx(6e-5)
    assert chosen(TrainingConfig(model="m", optimizer="adamw_8bit"))["learning_rate"] == pytest.approx(2e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "muon", "schedulefree_sgd"])
def test_an_optimizer_whose_rate_is_unlike_adams_needs_one_of_the_user(optimizer: str) -> None:
    schedule = {"lr_scheduler_type": "constant"} if optimizer.startswith("schedulefree") else {}
    with pytest.raises(GymError, match=f"learning_rate: no default is known for optimizer {optimizer}"):
        chosen(TrainingConfig(model="m", optimizer=optimizer, **schedule))
    assert "learning_rate" not in chosen(
        TrainingConfig(model="m", optimizer=optimizer, learning_rate=0.1, **schedule)
    )


def test_every_method_and_algorithm_has_a_rate_for_large_models() -> None:
    for name in TUNING.own():
        assert 1e-6 <= TUNING.type_of(name).default_learning_rate <= 1e-2
    for name in ALGORITHMS.own():
        assert 0 < ALGORITHMS.type_of(name).learning_rate_scale <= 1


def test_rows_are_not_cut_below_the_longest() -> None:
    assert for_rows(TrainingConfig(model="m"), 1000, longest=1700)["max_length"] >= 1700


def test_rows_are_cut_where_the_model_reads_no_more() -> None:
    assert for_rows(TrainingConfig(model="m"), 1000, longest=9000)["max_length"] == 8192


def test_short_rows_leave_room_for_longer_ones() -> None:
    assert for_rows(TrainingConfig(model="m"), 1000, longest=12)["max_length"] == 256


@pytest.mark.parametrize(("num_rows", "epochs"), [(200, 3), (2000, 3), (5000, 2), (50_000, 1)])
def test_many_rows_are_seen_fewer_times(num_rows: int, epochs: int) -> None:
    assert for_rows(TrainingConfig(model="m"), num_rows)["num_train_epochs"] == epochs


@pytest.mark.parametrize("num_rows", [8, 20, 40, 64])
def test_few_rows_still_make_enough_steps(num_rows: int) -> None:
    found = for_rows(TrainingConfig(model="m"), num_rows)
    batch = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]

    assert batch == rows_per_step(num_rows)
    assert found["num_train_epochs"] * num_rows / batch >= 20


def test_max_steps_of_the_user_leave_the_epochs_alone() -> None:
    assert "num_train_epochs" not in for_rows(TrainingConfig(model="m", max_steps=12), 100)


@pytest.mark.parametrize(("num_rows", "epochs"), [(10, 3), (160, 2), (400, 1), (5000, 1)])
def test_many_preferences_are_seen_once_and_few_at_most_three_times(num_rows: int, epochs: int) -> None:
    assert for_rows(TrainingConfig(model="m", algorithm="dpo"), num_rows)["num_train_epochs"] == epochs


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (0.5, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
        (3.0, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        (
            8.0,
            {
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 8,
                "gradient_checkpointing": True,
            },
        ),
        (20.0, {"base_dtype": "bfloat16", "gradient_checkpointing": True}),
    ],
)
def test_the_batch_shrinks_and_memory_is_saved_until_a_run_fits(
    needs: float, expected: dict[str, Any]
) -> None:
    found = for_rows(TrainingConfig(model="m"), 1000, needs=needs)

    assert expected.items() <= found.items()
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 8


def test_a_run_that_fits_in_no_way_says_so() -> None:
    config = applied(TrainingConfig(model="m"), method_defaults(TrainingConfig(model="m"), SMOLLM2))
    found = row_defaults(config, RowFacts(100, 10, 10, 100), lambda tried: 1e15, GIB)

    assert any("may still run out of memory" in one.reason for one in found)


@pytest.mark.parametrize(
    ("num_rows", "held_out"), [(10, None), (20, 4), (100, 10), (1000, 100), (100_000, 200)]
)
def test_a_tenth_of_the_rows_is_held_out_within_bounds(num_rows: int, held_out: int | None) -> None:
    found = split_default(TrainingConfig(model="m"), num_rows)
    assert (found and found.value) == held_out


@pytest.mark.parametrize(
    "given",
    [
        {"eval_split": 0.5},
        {"eval_data": [{"path": "x.jsonl"}]},
        {"eval_strategy": "no"},
        {"algorithm": "grpo", "graders": [{"grader": "exact"}]},
        {"tokenized_path": "encoded"},
    ],
)
def test_no_rows_are_held_out_where_the_config_decides_it(given: dict[str, Any]) -> None:
    assert split_default(TrainingConfig(model="m", **given), 1000) is None


def test_numbers_of_weights_are_said_shortly() -> None:
    assert [in_words(n) for n in (7_000_000_000, SMOLLM2, 999)] == ["7B", "135M", "999"]


def test_a_section_of_a_method_chooses_the_method() -> None:
    config = TrainingConfig(model="m", lora={"r": 4})

    assert config.finetuning == "lora"
    assert config.lora is not None
    assert config.lora.r == 4
    assert "finetuning" not in chosen(config)


def test_sections_of_two_methods_choose_neither() -> None:
    with pytest.raises(ValueError, match="is given, but finetuning is full"):
        TrainingConfig(model="m", lora={"r": 4}, vera={})


def test_one_row_far_longer_than_the_others_is_cut_and_reported() -> None:
    config = applied(TrainingConfig(model="m"), method_defaults(TrainingConfig(model="m"), SMOLLM2))
    found = row_defaults(config, RowFacts(1000, 60_000, 200, 131_072), lambda tried: 0.0, GIB)
    length = next(one for one in found if one.key == "max_length")

    assert length.value == 256
    assert "60,000, is cut" in length.reason


def test_prompts_of_rewards_leave_room_for_the_answer() -> None:
    config = TrainingConfig(
        model="m", algorithm="grpo", graders=[{"grader": "exact"}], grpo={"max_completion_length": 128}
    )
    found = row_defaults(config, RowFacts(100, 700, 700, 768), lambda tried: 0.0, GIB)

    assert next(one.value for one in found if one.key == "max_length") == 768 - 128


def test_a_step_is_shared_by_the_processes() -> None:
    config = applied(TrainingConfig(model="m"), method_defaults(TrainingConfig(model="m"), SMOLLM2))
    found = row_defaults(config, RowFacts(1000, 10, 10, 8192, num_processes=2), lambda tried: 0.0, GIB)
    values = {one.key: one.value for one in found}

    assert values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize("algorithm", ["gradient_difference", "npo"])
def test_rows_to_forget_are_never_split(algorithm: str) -> None:
    assert split_default(TrainingConfig(model="m", algorithm=algorithm), 1000) is None


def test_a_private_run_is_never_split() -> None:
    privacy = {"noise_multiplier": 1.0, "target_delta": 1e-5}
    assert split_default(TrainingConfig(model="m", privacy=privacy), 1000) is None


def test_a_model_little_above_the_limit_gets_an_adapter() -> None:
    assert chosen(TrainingConfig(model="m"), LARGE + 1)["finetuning"] == "lora"


def test_a_batch_is_never_smaller_than_the_algorithm_needs() -> None:
    found = for_rows(TrainingConfig(model="m", algorithm="kto"), 1000, needs=100.0)
    assert found["per_device_train_batch_size"] == 2
