"""What every aggregation rule must do; a file dropped into gym_fed/soup/aggregators is tested here by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS
from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.building import build_aggregator
from gym_fed.soup.gram import Needs

NAMES = AGGREGATORS.names()
ROBUST = [name for name in NAMES if AGGREGATORS.type_of(name).robust]
WEIGHTED = [name for name in NAMES if AGGREGATORS.type_of(name).weighted]
ONE_VOTE = [name for name in NAMES if not AGGREGATORS.type_of(name).weighted]
ALONE = [name for name in NAMES if AGGREGATORS.type_of(name).needs is Needs.NOTHING]
FROM_ZERO = {
    "byzantine_evidence",
    "byzantine_robust",
    "centred_clipping",
    "fltrust",
    "fltrust_caf",
    "majority_vote",
    "root_gate",
}
"""Rules that measure updates from no change at all: moving all updates alike does not just move the result."""


def rule(name: str, malicious: int = 0) -> Aggregator:
    return build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=malicious))


def merged(
    name: str,
    updates: Tensor,
    weights: Tensor | None = None,
    malicious: int = 0,
    root: Tensor | None = None,
) -> Tensor:
    """By one vote each unless said otherwise; the root update, where a rule needs one, is the mean by default."""
    made = rule(name, malicious)
    if root is None:
        root = updates.mean(dim=0)
    votes = torch.ones(len(updates)) if weights is None else weights
    return made.aggregate(updates, votes, root if made.needs is Needs.ROOT else None)


def updates_of(count: int, size: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def weights_for(name: str, count: int) -> Tensor:
    return torch.arange(1.0, count + 1) if name in WEIGHTED else torch.ones(count)


def test_the_rules_of_this_release_are_registered() -> None:
    assert set(NAMES) >= {
        "bulyan",
        "byzantine_evidence",
        "byzantine_robust",
        "caf",
        "centred_clipping",
        "fltrust",
        "fltrust_caf",
        "geometric_median",
        "krum",
        "majority_vote",
        "mean",
        "mean_around_median",
        "median",
        "minimum_diameter",
        "multi_krum",
        "root_gate",
        "trimmed_mean",
        "weighted_mean",
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_one_float32_vector_and_the_updates_stay_as_they_were(name: str) -> None:
    updates = updates_of(5)
    before = updates.clone()
    result = merged(name, updates)
    assert result.shape == (300,)
    assert result.dtype == torch.float32
    assert torch.equal(updates, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "malicious"), [(5, 0), (6, 0), (7, 1), (12, 2)])
def test_the_order_of_contributors_does_not_matter(name: str, count: int, malicious: int) -> None:
    malicious = malicious if name in ROBUST else 0
    updates, weights = updates_of(count), weights_for(name, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    given = merged(name, updates, weights, malicious)
    shuffled = merged(name, updates[order], weights[order], malicious)
    torch.testing.assert_close(given, shuffled, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1024.0, 2.0**-20])
def test_larger_updates_make_a_result_larger_alike(name: str, factor: float) -> None:
    updates = updates_of(9)
    malicious = 1 if name in ROBUST else 0
    scaled = merged(name, updates * factor, malicious=malicious)
    torch.testing.assert_close(
        scaled / factor, merged(name, updates, malicious=malicious), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FROM_ZERO])
def test_moving_all_updates_alike_moves_the_result_as_far(name: str) -> None:
    updates, way = updates_of(9), updates_of(1, seed=4)
    malicious = 1 if name in ROBUST else 0
    moved = merged(name, updates + way, malicious=malicious)
    torch.testing.assert_close(moved - way[0], merged(name, updates, malicious=malicious), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_equal_updates_come_out_as_they_are(name: str) -> None:
    update = updates_of(1)
    result = merged(name, update.repeat(7, 1), weights_for(name, 7))
    torch.testing.assert_close(result, update[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_update_is_its_own_aggregate(name: str) -> None:
    update = updates_of(1)
    torch.testing.assert_close(merged(name, update, torch.tensor([3.0])), update[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", WEIGHTED)
def test_only_the_ratios_of_weights_matter(name: str) -> None:
    updates, weights = updates_of(5), torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0])
    torch.testing.assert_close(merged(name, updates, weights), merged(name, updates, weights * 8))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_count(name: str) -> None:
    updates = updates_of(5)
    even = merged(name, updates)
    heavy = merged(name, updates, torch.tensor([1.0, 1.0, 20.0, 1.0, 1.0]))
    assert (heavy - updates[2]).norm() < (even - updates[2]).norm()


@pytest.mark.parametrize("name", ONE_VOTE)
def test_a_rule_of_one_vote_each_refuses_unequal_weights(name: str) -> None:
    with pytest.raises(GymError, match="gives every update one vote, but the weights differ") as caught:
        merged(name, updates_of(3), torch.tensor([1.0, 1.0, 2.0]))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", ALONE)
def test_a_rule_that_needs_nothing_else_treats_each_coordinate_alone(name: str) -> None:
    updates, weights = updates_of(5), weights_for(name, 5)
    whole = merged(name, updates, weights)
    halves = [merged(name, part, weights) for part in (updates[:, :101], updates[:, 101:])]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str) -> None:
    malicious = 1 if name in ROBUST else 0
    updates = updates_of(9, 100_000)
    root, weights = updates[0] + updates[1], weights_for(name, 9)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(merged(name, updates, weights, malicious, root))
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
        merged(name, updates)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("name", NAMES)
def test_doubles_beyond_float32_are_refused_with_the_update_that_holds_them(name: str) -> None:
    updates = updates_of(5).to(torch.float64)
    updates[3, 7] = 1e39
    with pytest.raises(GymError, match="update 3") as caught:
        merged(name, updates)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


def test_a_combination_that_float32_cannot_hold_is_refused() -> None:
    updates = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(GymError, match="combination") as caught:
        merged("fltrust", updates, root=torch.full((4,), 1e39, dtype=torch.float64))
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, float("nan"), 1.0]])
def test_weights_that_make_no_sense_are_refused(name: str, weights: list[float]) -> None:
    with pytest.raises(GymError) as caught:
        merged(name, updates_of(3), torch.tensor(weights))
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("name", [n for n in NAMES if AGGREGATORS.type_of(n).needs is not Needs.EVIDENCE])
def test_a_root_update_is_given_exactly_where_it_is_needed(name: str) -> None:
    made, updates = rule(name), updates_of(3)
    root = None if made.needs is Needs.ROOT else updates[0]
    with pytest.raises(GymError, match=r"needs root update|takes no root update") as caught:
        made.aggregate(updates, torch.ones(3), root)
    assert caught.value.code is ErrorCode.USAGE


ATTACKS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "huge": lambda count, honest: torch.full((count, honest.shape[1]), 1e30),
    "huge, each its own way": lambda count, honest: 1e30 * updates_of(count, honest.shape[1], seed=6),
    "opposite": lambda count, honest: -100.0 * honest.mean(dim=0).repeat(count, 1),
    "scattered": lambda count, honest: 1e6 * updates_of(count, honest.shape[1], seed=5),
    "shifted": lambda count, honest: (honest.mean(dim=0) + 3.0 * honest.std(dim=0)).repeat(count, 1),
    "mimic": lambda count, honest: honest[:1].repeat(count, 1),
    "zero": lambda count, honest: torch.zeros(count, honest.shape[1]),
}


def _range(honest: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    low, high = honest.min(dim=0).values, honest.max(dim=0).values
    return low - slack * (high - low), high + slack * (high - low)


SLACK = {"median": 0.0, "trimmed_mean": 0.0, "mean_around_median": 1.0, "bulyan": 1.0}
"""How far a coordinate may leave the honest values, in widths of their range: rules that average what is near the
median take in a malicious value that is no farther from it than the farthest honest value."""


@pytest.mark.parametrize("name", sorted(SLACK))
@pytest.mark.parametrize(("count", "malicious"), [(3, 1), (5, 2), (7, 1), (8, 2), (20, 4)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_malicious_clients_cannot_move_a_coordinate_beyond_the_honest_values(
    name: str, count: int, malicious: int, attack: str
) -> None:
    if count < rule(name).minimum(malicious):
        count = rule(name).minimum(malicious)
    honest = updates_of(count - malicious)
    lies = ATTACKS[attack](malicious, honest)
    result = merged(name, torch.cat([lies, honest]), malicious=malicious)
    low, high = _range(honest, SLACK[name])
    assert bool((result >= low).all())
    assert bool((result <= high).all())


@pytest.mark.parametrize("attack", ATTACKS)
def test_malicious_clients_cannot_make_a_majority_vote_larger_than_the_honest_values(attack: str) -> None:
    honest = updates_of(6)
    lies = ATTACKS[attack](5, honest)
    result = merged("majority_vote", torch.cat([lies, honest]), malicious=5)
    assert bool((result.abs() <= honest.abs().max(dim=0).values).all())


def _bound(name: str, count: int, malicious: int, honest: Tensor) -> float:
    """How far malicious clients may move a rule from the honest mean, by its paper or as derived here."""
    mean = honest.mean(dim=0)
    away = (honest - mean).norm(dim=1)
    farthest, variance = float(away.max()), float(away.square().mean())
    diameter = float(torch.cdist(honest, honest).max())
    n, f = count, malicious
    return {
        # Allouah et al. 2023, "Fixing by Mixing", table 1: squared error over the honest variance.
        "krum": math.sqrt(6 * (1 + f / (n - 2 * f)) * variance),
        # Every selected update scores no more than the worst honest one, so an honest one is near it.
        "multi_krum": diameter * (1 + math.sqrt((n - f - 2) / max(1, n - 2 * f - 2))),
        # The triangle inequality on the sum of distances.
        "geometric_median": 2 * (n - f) / (n - 2 * f) * float(away.mean()),
        # Farhadkhani et al. 2022, table 1.
        "minimum_diameter": 2 * f / (n - f) * diameter,
        # A step brings it nearer by (n/2 - 2f)/n of the way at least, ten steps from zero.
        "centred_clipping": farthest * n / (n - 4 * f) + float(mean.norm()) * (0.5 + 2 * f / n) ** 10,
        # No longer than the root, which is the honest mean here.
        "fltrust": 2 * float(mean.norm()),
        "fltrust_caf": 2 * float(mean.norm()),
        "root_gate": 2 * float(mean.norm()),
        # (f, kappa)-robust by the honest covariance's norm, which the variance exceeds (Allouah et al. 2025); the
        # factor is this test's.
        "caf": math.sqrt(10 * f / (n - 2 * f) * variance),
        "byzantine_robust": math.sqrt(10 * f / (n - 2 * f) * variance),
        # Two more medians of length, each update weighted 1 / (n - 2f) at most.
        "byzantine_evidence": math.sqrt(10 * f / (n - 2 * f) * variance)
        + 2 * float(honest.norm(dim=1).max()) / (n - 2 * f),
    }[name]


@pytest.mark.parametrize(
    "name", [n for n in ROBUST if n not in SLACK and not issubclass(AGGREGATORS.type_of(n), CoordinateRule)]
)
@pytest.mark.parametrize(("count", "malicious"), [(7, 1), (11, 2), (20, 4), (50, 12)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_malicious_clients_cannot_move_a_result_far_from_the_honest_mean(
    name: str, count: int, malicious: int, attack: str
) -> None:
    honest = updates_of(count - malicious) + 0.5
    lies = ATTACKS[attack](malicious, honest)
    mean = honest.mean(dim=0)
    result = merged(name, torch.cat([lies, honest]), malicious=malicious, root=mean)
    assert float((result - mean).norm()) <= _bound(name, count, malicious, honest)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("malicious", [1, 3])
def test_more_malicious_clients_than_the_rule_can_outvote_are_refused(name: str, malicious: int) -> None:
    needed = rule(name).minimum(malicious)
    merged(name, updates_of(needed), malicious=malicious)
    message = rf"num_malicious_nodes: {malicious}.*needs {needed}"
    with pytest.raises(GymError, match=message) as caught:
        merged(name, updates_of(needed - 1), malicious=malicious)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROBUST])
def test_a_rule_that_withstands_no_malicious_client_is_refused_as_such(name: str) -> None:
    with pytest.raises(GymError, match="withstands no malicious client") as caught:
        merged(name, updates_of(5), malicious=1)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize(
    "updates",
    [
        torch.zeros(11, 40),
        torch.outer(torch.linspace(-1.0, 1.0, 11), torch.ones(40)),
        torch.eye(11, 40),
        updates_of(11, 40).sign(),
        torch.cat([torch.full((5, 40), 3e38), -torch.full((5, 40), 3e38), torch.ones(1, 40)]),
        updates_of(11, 40) * 1e-44,
        torch.cat([torch.zeros(6, 40), updates_of(5, 40)]),
        1.0 + 1e-7 * updates_of(11, 40),
    ],
    ids=["zeros", "a line", "unit vectors", "signs", "largest", "smallest", "mostly zeros", "nearly equal"],
)
def test_no_finite_updates_make_a_result_that_is_not(name: str, updates: Tensor) -> None:
    root = torch.ones(40)
    trusts_a_root = AGGREGATORS.type_of(name).needs is Needs.ROOT
    if trusts_a_root and not bool((updates @ root > 0.0).any()):
        with pytest.raises(GymError, match="has a positive cosine to the root update"):
            merged(name, updates, malicious=2, root=root)
        return
    result = merged(name, updates, malicious=2, root=root)
    assert bool(torch.isfinite(result).all())
    largest = root.norm() if trusts_a_root else updates.abs().max()
    assert bool((result.abs() <= largest).all())


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_a_rule_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(GymError, match="colour: unknown key") as caught:
        build_aggregator(SoupRecipe(aggregator=name, aggregator_options={"colour": "red"}))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", NAMES)
def test_a_single_update_does_not_share_its_memory_with_the_result(name: str) -> None:
    update = updates_of(1)
    before = update.clone()
    merged(name, update, torch.ones(1)).add_(1.0)
    assert torch.equal(update, before)
