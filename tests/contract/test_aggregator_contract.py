"""What every aggregation rule must do; a file dropped into gym_fed/soup/aggregators is tested here by itself."""

from __future__ import annotations

import pytest
import torch

from gym_fed.config.soup import SoupRecipe
from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup import Aggregator, aggregator_names, build_aggregator, get_aggregator

NAMES = aggregator_names()
ROBUST = [name for name in NAMES if get_aggregator(name).robust]


def rule(name: str, malicious: int = 0) -> Aggregator:
    return build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=malicious))


def updates_of(count: int, size: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def test_the_rules_of_this_release_are_registered() -> None:
    assert {"mean", "median", "trimmed_mean"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_one_float32_vector_and_the_updates_stay_as_they_were(name: str) -> None:
    updates = updates_of(5)
    before = updates.clone()
    result = rule(name).aggregate(updates, torch.ones(5))
    assert result.shape == (300,)
    assert result.dtype == torch.float32
    assert torch.equal(updates, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [5, 6])
def test_the_order_of_contributors_does_not_matter(name: str, count: int) -> None:
    updates, weights = updates_of(count), torch.arange(1.0, count + 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    given = rule(name, 0).aggregate(updates, weights)
    shuffled = rule(name, 0).aggregate(updates[order], weights[order])
    torch.testing.assert_close(given, shuffled, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_equal_updates_come_out_as_they_are(name: str) -> None:
    update = updates_of(1)
    result = rule(name).aggregate(update.repeat(7, 1), torch.tensor([1.0, 2, 3, 4, 5, 6, 7]))
    torch.testing.assert_close(result, update[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_update_is_its_own_aggregate(name: str) -> None:
    update = updates_of(1)
    torch.testing.assert_close(
        rule(name).aggregate(update, torch.tensor([3.0])), update[0], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_the_ratios_of_weights_matter(name: str) -> None:
    updates, weights = updates_of(5), torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0])
    torch.testing.assert_close(
        rule(name).aggregate(updates, weights), rule(name).aggregate(updates, weights * 8)
    )


@pytest.mark.parametrize("name", NAMES)
def test_weights_count(name: str) -> None:
    updates = updates_of(5)
    even = rule(name).aggregate(updates, torch.ones(5))
    heavy = rule(name).aggregate(updates, torch.tensor([1.0, 1.0, 20.0, 1.0, 1.0]))
    assert (heavy - updates[2]).norm() < (even - updates[2]).norm()


@pytest.mark.parametrize("name", NAMES)
def test_each_coordinate_is_treated_alone(name: str) -> None:
    updates, weights = updates_of(5), torch.tensor([1.0, 2.0, 1.0, 1.5, 1.0])
    whole = rule(name).aggregate(updates, weights)
    halves = [rule(name).aggregate(part, weights) for part in (updates[:, :101], updates[:, 101:])]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str) -> None:
    updates, weights = updates_of(9, 200_000), torch.rand(9, generator=torch.Generator().manual_seed(3)) + 0.5
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(rule(name).aggregate(updates, weights))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_with_the_update_that_holds_them(
    name: str, bad: float
) -> None:
    updates = updates_of(5)
    updates[3, 7] = bad
    with pytest.raises(GymError, match="update 3") as caught:
        rule(name).aggregate(updates, torch.ones(5))
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, float("nan"), 1.0]])
def test_weights_that_make_no_sense_are_refused(name: str, weights: list[float]) -> None:
    with pytest.raises(GymError) as caught:
        rule(name).aggregate(updates_of(3), torch.tensor(weights))
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize(("count", "malicious"), [(3, 1), (5, 2), (8, 2), (20, 4)])
@pytest.mark.parametrize("attack", ["huge", "opposite", "scattered"])
def test_liars_cannot_move_a_coordinate_beyond_the_honest_values(
    name: str, count: int, malicious: int, attack: str
) -> None:
    honest = updates_of(count - malicious)
    lies = {
        "huge": torch.full((malicious, 300), 1e30),
        "opposite": -100.0 * honest.mean(dim=0).repeat(malicious, 1),
        "scattered": 1e6 * updates_of(malicious, seed=5),
    }[attack]
    result = rule(name, malicious).aggregate(torch.cat([lies, honest]), torch.ones(count))
    assert bool((result >= honest.min(dim=0).values).all())
    assert bool((result <= honest.max(dim=0).values).all())


@pytest.mark.parametrize("name", ROBUST)
def test_more_liars_than_the_rule_can_outvote_are_refused(name: str) -> None:
    with pytest.raises(GymError, match=r"num_malicious_nodes: 2.*takes 5") as caught:
        rule(name, 2).aggregate(updates_of(4), torch.ones(4))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROBUST])
def test_a_rule_that_withstands_no_liar_says_so(name: str) -> None:
    with pytest.raises(GymError, match="withstands no liar") as caught:
        rule(name, 1).aggregate(updates_of(5), torch.ones(5))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_a_rule_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(GymError, match="colour: unknown key") as caught:
        build_aggregator(SoupRecipe(aggregator=name, aggregator_options={"colour": "red"}))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
