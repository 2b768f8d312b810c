"""Steps before a rule: together they are what they are one after the other."""

from __future__ import annotations

import pytest
import torch

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, PRE_AGGREGATORS
from gym_fed.soup.gram import GramMatrix, Needs
from gym_fed.soup.pipeline import Pipeline

STEPS = PRE_AGGREGATORS.names()
RULES = AGGREGATORS.names()


def updates_of(count: int, size: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def pipeline(rule: str, steps: list[str], malicious: int) -> Pipeline:
    options = {"bucketing": {"seed": 5}} if "bucketing" in steps else {}
    return Pipeline.of(
        SoupRecipe(
            aggregator=rule,
            pre_aggregators=steps,
            pre_aggregator_options=options,
            num_malicious_nodes=malicious if AGGREGATORS.type_of(rule).robust else 0,
        )
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "steps", [*([name] for name in STEPS), ["arc", "nnm"], ["bucketing", "norm_cap", "nnm"]]
)
def test_a_pipeline_is_its_steps_one_after_the_other(rule: str, steps: list[str]) -> None:
    """n = 22, f = 2: eleven buckets are left, enough for every rule."""
    whole = pipeline(rule, steps, 2)
    updates = updates_of(22)
    updates[3], updates[17] = 40.0, -updates[:15].mean(dim=0) * 20.0
    root = updates_of(1, seed=9)[0] * 0.1 + updates[5:9].mean(dim=0) if whole.needs is Needs.ROOT else None
    vectors, weights = updates.double(), torch.ones(22, dtype=torch.float64)
    for step in whole.pre_aggregators:
        vectors, weights = step.apply(vectors, weights)
    own = None if root is None else root.double()
    combination = whole.aggregator.mix(GramMatrix.of(vectors, weights, own))
    wanted = whole.aggregator.combine(combination.applied(vectors).float(), combination.weights)
    found = whole.aggregate(updates, torch.ones(22), root)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("steps", [["arc", "nnm"], ["norm_cap", "bucketing"]])
def test_honest_updates_that_are_equal_survive_every_step_and_rule(steps: list[str]) -> None:
    update = updates_of(1)
    lies = torch.cat([torch.full((1, 200), 1e30), -update])
    for rule in RULES:
        if not AGGREGATORS.type_of(rule).robust or AGGREGATORS.type_of(rule).needs is Needs.ROOT:
            continue
        result = pipeline(rule, steps, 2).aggregate(torch.cat([lies, update.repeat(20, 1)]), torch.ones(22))
        assert float((result - update[0]).norm()) <= 0.35 * float(update.norm()), rule


def test_buckets_are_counted_before_the_rule_is_asked() -> None:
    """Krum withstands 2 malicious clients among 7 updates; 12 updates in buckets of two are 6."""
    pipeline("krum", ["bucketing"], 2).check(torch.ones(13))
    with pytest.raises(GymError, match=r"6 updates are too few for aggregator 'krum' .* needs 7") as caught:
        pipeline("krum", ["bucketing"], 2).check(torch.ones(12))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("rule", "count"), [("krum", 1000), ("geometric_median", 1000), ("byzantine_robust", 400)]
)
def test_a_thousand_contributors_are_within_reach(rule: str, count: int) -> None:
    honest = updates_of(count - 40)
    lies = torch.full((40, 200), 3.0)
    result = pipeline(rule, ["norm_cap"], 40).aggregate(torch.cat([lies, honest]), torch.ones(count))
    assert float(result.mean()) < 0.5
