"""The searches beneath the rules: eigenvectors, vertex covers, geometric medians where they are hard; and refusals."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from gym_fed.config.hub.soup import Option, SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.aggregators.caf import top_eigenvector
from gym_fed.soup.aggregators.geometric_median import spatial_median
from gym_fed.soup.aggregators.minimum_diameter import Conflicts
from gym_fed.soup.building import build_aggregator
from gym_fed.soup.gram import Array


@pytest.mark.parametrize("seed", range(40))
def test_the_top_eigenvector_is_numpys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 65))
    rows = rng.standard_normal((count, int(rng.integers(1, count + 2)))) * 10.0 ** rng.integers(-20, 30)
    if seed % 4 == 0:
        rows = np.sign(rows)
    matrix = rows @ rows.T
    value, vector = top_eigenvector(matrix)
    wanted = np.linalg.eigvalsh(matrix)[-1]
    assert value == pytest.approx(wanted, rel=1e-9)
    assert float(np.linalg.norm(matrix @ vector - value * vector)) <= 1e-8 * wanted
    assert float(np.linalg.norm(vector)) == pytest.approx(1.0)


def test_the_top_eigenvector_of_hundreds_of_updates_is_found_within_its_steps() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((500, 40))
    rows[:50] += 2.0
    value, _ = top_eigenvector(rows @ rows.T)
    assert value == pytest.approx(np.linalg.eigvalsh(rows @ rows.T)[-1], rel=1e-9)


def test_the_top_eigenvector_of_nothing_is_some_direction() -> None:
    value, vector = top_eigenvector(np.zeros((3, 3)))
    assert value == 0.0
    assert float(np.linalg.norm(vector)) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(60))
def test_conflicts_are_taken_exactly_while_some_omissions_resolve_them_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, limit = int(rng.integers(3, 10)), int(rng.integers(1, 5))
    pairs = [tuple(pair) for pair in rng.permutation(list(combinations(range(count), 2)))]
    conflicts = Conflicts(limit)
    taken: list[tuple[int, int]] = []
    for first, second in pairs:
        possible = any(
            all({a, b} & set(left_out) for a, b in [*taken, (first, second)])
            for size in range(limit + 1)
            for left_out in combinations(range(count), size)
        )
        assert conflicts.part(int(first), int(second)) == possible
        if possible:
            taken.append((first, second))
        assert len(conflicts.omitted) <= limit
        assert all({a, b} & conflicts.omitted for a, b in taken)


def slope(rows: Array, weights: Array, point: Array) -> float:
    """Length of the gradient of the weighted mean distance."""
    away = point - rows
    units = away / np.linalg.norm(away, axis=1)[:, None]
    return float(np.linalg.norm(weights @ units / weights.sum()))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", ["clouds", "weights", "signs", "far"])
def test_the_geometric_median_has_no_slope(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(3, 40)), int(rng.integers(2, 20))
    rows, weights = rng.standard_normal((count, size)), np.ones(count)
    if kind == "weights":
        weights = rng.uniform(0.8, 1.2, count)
    elif kind == "signs":
        rows = np.sign(rows) * rng.uniform(0.9, 1.1, (count, 1))
    elif kind == "far":
        rows[: (count - 1) // 2] *= 1e6
    found = spatial_median(rows @ rows.T, weights, 1e-8, 500)
    point = found @ rows
    if found.max() == 1.0:  # an update: no move from it shortens the way
        best = weights @ np.linalg.norm(rows - point, axis=1)
        for _ in range(20):
            nearby = point + 1e-3 * rng.standard_normal(size)
            assert weights @ np.linalg.norm(rows - nearby, axis=1) >= best
    else:
        assert slope(rows, weights, point) <= 1e-7


@pytest.mark.parametrize("exponent", range(2, 9))
def test_the_geometric_median_just_beside_an_update_is_found(exponent: int) -> None:
    """An angle a little below 120 degrees: Weiszfeld's steps alone would need 10**exponent of them."""
    angle = 2 * np.pi / 3 - 10.0**-exponent
    rows = np.array([[0.0, 0.0], [1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    point = spatial_median(rows @ rows.T, np.ones(3), 1e-10, 60) @ rows
    wanted = (
        np.sin(np.pi / 3 - angle / 2) * 2 / np.sqrt(3)
    )  # the point that sees every edge under 120 degrees
    assert float(np.linalg.norm(point)) == pytest.approx(wanted, rel=0.05)


def test_two_updates_meet_in_the_middle_and_four_on_a_line_between_the_inner_two() -> None:
    pair = np.array([[0.0, 1.0], [2.0, 5.0]])
    np.testing.assert_allclose(spatial_median(pair @ pair.T, np.ones(2), 1e-8, 10) @ pair, [1.0, 3.0])
    line = np.outer([0.0, 1.0, 2.0, 9.0], [0.6, 0.8])
    np.testing.assert_allclose(spatial_median(line @ line.T, np.ones(4), 1e-8, 10) @ line, [0.9, 1.2])


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4, 1e-9])
def test_products_that_are_only_nearly_exact_do_not_stop_the_search(spread: float) -> None:
    """Kernels give inner products to within 8e-7 of the norms; near copies then have distances of noise."""
    rng = np.random.default_rng(0)
    for count in (3, 8, 30):
        rows = 1.0 + spread * rng.standard_normal((count, 20))
        noise = rng.uniform(-8e-7, 8e-7, (count, count))
        norms = np.linalg.norm(rows, axis=1)
        products = rows @ rows.T + (noise + noise.T) / 2 * norms * norms[:, None]
        found = spatial_median(products, np.ones(count), 1e-8, 500) @ rows
        assert float(np.linalg.norm(found - rows.mean(axis=0))) <= 2.0 * spread * np.sqrt(20)


def test_a_search_that_is_cut_short_says_so() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 4))
    with pytest.raises(GymError, match=r"max_iterations: 1 .* tolerance 1e-12") as caught:
        spatial_median(rows @ rows.T, np.ones(9), 1e-12, 1)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("name", "malicious", "options", "count", "message"),
    [
        ("minimum_diameter", 21, {}, 60, r"num_malicious_nodes up to 20, not 21 .*choose multi_krum"),
        ("multi_krum", 2, {"num_selected": 6}, 7, r"num_selected 6 exceeds the 5 honest updates"),
        ("krum", 2, {}, 6, r"6 updates are too few .* needs 7"),
        ("bulyan", 2, {}, 10, r"10 updates are too few .* needs 11"),
        ("trimmed_mean", 0, {"trim": 3}, 6, "trim 3 leaves none of 6 updates"),
    ],
)
def test_rounds_that_a_rule_cannot_serve_are_refused_with_what_is_missing(
    name: str, malicious: int, options: dict[str, Option], count: int, message: str
) -> None:
    recipe = SoupRecipe(aggregator=name, num_malicious_nodes=malicious, aggregator_options=options)
    with pytest.raises(GymError, match=message) as caught:
        build_aggregator(recipe).aggregate(torch.randn(count, 3), torch.ones(count))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", ["median", "geometric_median", "majority_vote"])
def test_malicious_clients_who_hold_half_of_the_weight_are_refused(name: str) -> None:
    rule = build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=1))
    with pytest.raises(GymError, match="at least half of the weight") as caught:
        rule.aggregate(torch.ones(3, 1), torch.tensor([1.0, 1.0, 2.0]))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (torch.zeros(2), "root update of aggregator {!r} is zero"),
        (-torch.ones(2), "no update of 3 has a positive cosine"),
    ],
)
@pytest.mark.parametrize("name", ["fltrust", "fltrust_caf", "root_gate"])
def test_a_root_that_nobody_agrees_with_is_refused(name: str, root: torch.Tensor, message: str) -> None:
    rule = build_aggregator(SoupRecipe(aggregator=name))
    with pytest.raises(GymError, match=message.format(name)) as caught:
        rule.aggregate(torch.ones(3, 2), torch.ones(3), root)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.filterwarnings("error")
def test_updates_that_are_all_stretched_alike_stay_where_the_filter_would_leave_nobody() -> None:
    """Of three, two point the root's way, as far from their mean as each other: both projections are the largest."""
    updates = torch.tensor([[0.0, -5.0], [4.0, 0.5], [-4.0, 0.5]])
    rule = build_aggregator(SoupRecipe(aggregator="fltrust_caf", num_malicious_nodes=1))
    found = rule.aggregate(updates, torch.ones(3), torch.tensor([0.0, 1.0]))
    scaled = updates[1:] / updates[1:].norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, scaled.mean(dim=0))


@pytest.mark.parametrize("name", ["minimum_diameter", "bulyan", "caf", "geometric_median"])
def test_malicious_clients_at_1e30_and_a_hundred_contributors_leave_the_honest_their_digits(
    name: str,
) -> None:
    """Where malicious clients count for nothing, their size shows in no bit but those of rounding."""
    honest = torch.randn(90, 50, generator=torch.Generator().manual_seed(0))
    rule = build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=10))
    huge, large = (
        rule.aggregate(torch.cat([torch.full((10, 50), size), honest]), torch.ones(100))
        for size in (1e30, 1e12)
    )
    torch.testing.assert_close(huge, large, rtol=1e-5, atol=1e-6)
