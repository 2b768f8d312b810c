"""Ways around a rule that are closed: weights in buckets, options against the recipe, pools beyond exact floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.quantization import DeltaSoupConfig
from gym_fed.soup.aggregators.caf import CAF, CAFConfig
from gym_fed.soup.credit import RunningScore, split_pool
from gym_fed.soup.gram import GramMatrix
from gym_fed.soup.merging import merge
from gym_fed.soup.pipeline import Pipeline


@pytest.mark.parametrize("rule", ["median", "geometric_median", "majority_vote"])
def test_buckets_do_not_hide_one_update_that_holds_half_of_the_weight(rule: str) -> None:
    recipe = SoupRecipe(
        aggregator=rule,
        pre_aggregators=["bucketing"],
        num_malicious_nodes=1,
        weighting="num_examples",
        num_examples_cap=1000,
    )
    updates = torch.tensor([[1.0]] * 6 + [[-1e6]])
    with pytest.raises(GymError, match="unequal weight") as caught:
        Pipeline.of(recipe).aggregate(updates, torch.tensor(recipe.weights([1] * 6 + [10**9])))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    "options",
    [
        {"aggregator_options": {"num_malicious_nodes": 0}},
        {"server_optimizer": "adam", "server_optimizer_options": {"num_malicious_nodes": 3}},
        {"pre_aggregators": ["nnm"], "pre_aggregator_options": {"nnm": {"num_malicious_nodes": 0}}},
    ],
)
def test_no_option_of_a_rule_overrules_the_malicious_clients_of_the_recipe(
    options: dict[str, object],
) -> None:
    with pytest.raises(ValidationError, match="num_malicious_nodes"):
        SoupRecipe(aggregator="trimmed_mean", num_malicious_nodes=1, **options)  # type: ignore[arg-type]


def test_every_round_draws_other_buckets_and_says_which() -> None:
    recipe = SoupRecipe(aggregator="median", pre_aggregators=["bucketing"])
    seeds = [recipe.for_round(r).pre_aggregator_options["bucketing"]["seed"] for r in (1, 2)]
    assert seeds == [1, 2]
    updates = torch.arange(12.0)[:, None] ** 2
    results = {float(Pipeline.of(recipe.for_round(r)).aggregate(updates, torch.ones(12))) for r in range(6)}
    assert len(results) > 1
    plain = SoupRecipe(aggregator="median")
    assert plain.for_round(3) is plain


def test_rules_that_trust_a_root_need_one_honest_update_only() -> None:
    SoupRecipe(aggregator="fltrust", num_malicious_nodes=2).check_feasible(3)
    with pytest.raises(GymError, match="at least 5"):
        SoupRecipe(aggregator="median", num_malicious_nodes=2).check_feasible(3)
    with pytest.raises(ValidationError, match="root update"):
        DeltaSoupConfig(method="fltrust")  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", [1, 1000, 10**17, 10**18 + 1])
def test_a_pool_is_paid_out_to_the_last_credit(pool: int) -> None:
    assert sum(split_pool(pool, {"a": 1.0, "b": 1.0, "c": 1.0}).values()) == pool
    assert sum(split_pool(pool, {"a": 0.1, "b": 1e-9, "c": 3.7}).values()) == pool


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1e-90, 1e-160])
def test_updates_too_small_to_distinguish_do_not_keep_the_filter_going(size: float) -> None:
    updates = size * torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = GramMatrix.of(updates, torch.ones(9))
    weights = CAF(CAFConfig(num_malicious_nodes=3)).weigh(gram)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_a_residual_that_nobody_asked_for_is_refused_whatever_the_codec(tmp_path: Path) -> None:
    spec = BaseSpec.of({"w": torch.zeros(6, 8)}, "tiny")
    write_delta(tmp_path / "u", [DeltaEntry.of("w", torch.randn(6, 8), "lora", rank=2)], spec)
    codec = {"codec": "lora", "lora_rank": 2, "error_feedback": False}
    recipe = SoupRecipe.model_validate({"codec": codec})
    residual = ErrorFeedback.load(tmp_path / "residual", lineage=spec.digest)
    with DeltaFile.open(tmp_path / "u", spec) as update, pytest.raises(GymError, match="residual"):
        merge([update], [1.0], recipe, tmp_path / "s", spec, residual)
    assert not (tmp_path / "s").exists()


def test_a_score_counts_as_work_only_above_the_chance_level() -> None:
    assert not RunningScore(np.zeros(3)).is_work
    assert not RunningScore(np.ones(3), chance=1e3).is_work
    assert RunningScore(np.ones(3), chance=1e-3).is_work
