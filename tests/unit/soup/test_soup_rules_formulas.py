"""Each rule against its paper's formula, written out on explicit float64 vectors: no inner products, no shared code."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.registries import AGGREGATORS
from gym_fed.soup.aggregator import CoordinateRule
from gym_fed.soup.building import build_aggregator, build_pre_aggregators

Vectors = NDArray[np.float64]
ATTACKS = ["none", "huge", "scattered", "colluding", "mimic", "shifted"]


def round_of(attack: str, count: int, malicious: int, size: int = 12, seed: int = 0) -> Vectors:
    """``[count, size]``, the malicious clients in between; values that float32 holds."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, size)) + 0.3
    attackers = rng.permutation(count)[:malicious]
    honest = np.setdiff1d(np.arange(count), attackers)
    mean = rows[honest].mean(axis=0)
    if attack == "huge":
        rows[attackers] = 1e30
    elif attack == "scattered":
        rows[attackers] = 1e4 * rng.standard_normal((malicious, size))
    elif attack == "colluding":
        rows[attackers] = -5.0 * mean
    elif attack == "mimic":
        rows[attackers] = rows[honest[0]]
    elif attack == "shifted":
        rows[attackers] = mean + 1.5 * rows[honest].std(axis=0)
    return rows.astype(np.float32).astype(np.float64)


def aggregated(
    name: str,
    rows: Vectors,
    malicious: int,
    weights: Vectors | None = None,
    root: Vectors | None = None,
    **options: bool | int | float | str,
) -> Vectors:
    recipe = SoupRecipe(aggregator=name, num_malicious_nodes=malicious, aggregator_options=options)
    votes = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    own = None if root is None else torch.tensor(root, dtype=torch.float32)
    found = build_aggregator(recipe).aggregate(torch.tensor(rows, dtype=torch.float32), votes, own)
    return found.double().numpy()


def stepped(
    name: str,
    rows: Vectors,
    malicious: int,
    weights: Vectors | None = None,
    **options: bool | int | float | str,
) -> Vectors:
    recipe = SoupRecipe(
        aggregator="median",
        pre_aggregators=[name],
        pre_aggregator_options={name: options},
        num_malicious_nodes=malicious,
    )
    votes = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    vectors, _ = build_pre_aggregators(recipe)[0].apply(torch.tensor(rows), votes)
    return vectors.numpy()


def close(found: Vectors, wanted: Vectors, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def krum_score(rows: Vectors, index: int, among: list[int], malicious: int) -> float:
    others = sorted(float(np.sum((rows[index] - rows[j]) ** 2)) for j in among if j != index)
    return sum(others[: max(1, len(among) - malicious - 2)])


PAGES = [
    name
    for name in AGGREGATORS.own()
    if getattr(AGGREGATORS.type_of(name), "formula", CoordinateRule.formula) is not CoordinateRule.formula
]
"""Rules that show their mathematics beside the kernel that computes them."""


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("name", PAGES)
def test_a_kernel_computes_the_formula_of_its_rule(name: str, count: int, attack: str) -> None:
    rule = build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=2))
    assert isinstance(rule, CoordinateRule)
    rows = torch.tensor(round_of(attack, count, 2), dtype=torch.float32)
    for weights in (torch.ones(count), torch.arange(1.0, count + 1.0))[: 1 + rule.weighted]:
        wanted = rule.formula(rows.double(), weights.double())
        torch.testing.assert_close(rule.combine(rows, weights.double()), wanted.float(), rtol=1e-6, atol=0)


def test_median_trimmed_mean_and_mean_around_median_show_a_formula() -> None:
    assert {"median", "trimmed_mean", "mean_around_median"} <= set(PAGES)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(7, 2), (12, 3), (12, 0)])
def test_krum_and_multi_krum(attack: str, count: int, malicious: int) -> None:
    rows = round_of(attack, count, malicious)
    everyone = list(range(count))
    order = sorted(everyone, key=lambda i: krum_score(rows, i, everyone, malicious))
    close(aggregated("krum", rows, malicious), rows[order[0]])
    close(aggregated("multi_krum", rows, malicious), rows[order[: count - malicious]].mean(axis=0))
    close(aggregated("multi_krum", rows, malicious, num_selected=3), rows[order[:3]].mean(axis=0))


def around_median(rows: Vectors, keep: int) -> Vectors:
    found = []
    for column in rows.T:
        middle = np.median(column)
        nearest = sorted(column, key=lambda value: (abs(value - middle), value))
        found.append(np.mean(nearest[:keep]))
    return np.array(found)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(5, 2), (12, 3), (6, 0)])
def test_the_mean_around_the_median(attack: str, count: int, malicious: int) -> None:
    rows = round_of(attack, count, malicious)
    close(aggregated("mean_around_median", rows, malicious), around_median(rows, count - malicious))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(7, 1), (15, 3), (16, 3)])
def test_bulyan(attack: str, count: int, malicious: int) -> None:
    rows = round_of(attack, count, malicious)
    left, selected = list(range(count)), []
    for _ in range(count - 2 * malicious):
        scores = {i: krum_score(rows, i, left, malicious) for i in left}
        lowest = [i for i in left if scores[i] <= min(scores.values()) * (1 + 1e-12)]
        winner = min(lowest, key=lambda i: sum(float(np.sum((rows[i] - rows[j]) ** 2)) for j in left))
        left.remove(winner)
        selected.append(winner)
    wanted = around_median(rows[sorted(selected)], count - 4 * malicious)
    close(aggregated("bulyan", rows, malicious), wanted)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_geometric_median_is_where_a_general_minimiser_finds_it(attack: str, weighted: bool) -> None:
    rows = round_of(attack, 11, 3)
    weights = np.linspace(1.0, 1.5, 11) if weighted else np.ones(11)
    near = rows[np.abs(rows).max(axis=1) < 1e3]

    def distances(point: Vectors) -> float:
        """Less those from the origin, which are constant, so that 1e30 costs no digits."""
        total = 0.0
        for row, weight in zip(rows, weights, strict=True):
            away, base = np.linalg.norm(row - point), np.linalg.norm(row)
            total += weight * (point @ (point - 2.0 * row)) / (away + base)
        return total

    def slope(point: Vectors) -> Vectors:
        away = np.linalg.norm(rows - point, axis=1)[:, None]
        return np.asarray((weights[:, None] * (point - rows) / away).sum(axis=0))

    best = minimize(distances, near.mean(axis=0) + 0.01, jac=slope, method="BFGS", options={"gtol": 1e-9}).x
    found = aggregated("geometric_median", rows, 3, weights if weighted else None)
    assert distances(found) <= distances(best) + 1e-6
    close(found, best, 1e-4)


def test_a_geometric_median_that_is_an_update_is_that_update_to_the_bit() -> None:
    """Fermat's triangle with an angle above 120 degrees: its corner is the median."""
    rows = np.array([[0.1, 0.2], [1.1, 0.2], [-0.85, 0.3]])
    found = aggregated("geometric_median", rows, 1)
    assert np.array_equal(found, rows[0].astype(np.float32))


def test_the_median_of_a_triangle_sees_its_edges_under_equal_angles() -> None:
    rows = np.array([[0.0, 0.0], [1.0, 0.0], [0.3, 0.9]])
    units = rows - aggregated("geometric_median", rows, 1)
    units /= np.linalg.norm(units, axis=1)[:, None]
    close(units @ units.T, np.full((3, 3), -0.5) + 1.5 * np.eye(3), 1e-6)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(5, 1), (9, 3), (11, 5)])
def test_the_minimum_diameter(attack: str, count: int, malicious: int) -> None:
    rows = round_of(attack, count, malicious)
    distances = np.array([[np.sum((a - b) ** 2) for b in rows] for a in rows])

    def spread(subset: tuple[int, ...]) -> list[float]:
        return sorted((distances[i, j] for i, j in combinations(subset, 2)), reverse=True)

    subsets = list(combinations(range(count), count - malicious))
    least = spread(min(subsets, key=spread))
    best = [
        s for s in subsets if np.allclose(spread(s), least, rtol=1e-9)
    ]  # several, where updates are copies
    found = aggregated("minimum_diameter", rows, malicious)
    assert any(np.allclose(found, rows[list(s)].mean(axis=0), rtol=2e-6, atol=2e-6) for s in best)


@pytest.mark.parametrize("seed", range(20))
def test_the_minimum_diameter_of_points_in_the_plane(seed: int) -> None:
    """Few dimensions, where many subsets come close and the search has to branch."""
    rows = round_of("none", 11, 0, size=2, seed=seed)
    distances = np.array([[np.sum((a - b) ** 2) for b in rows] for a in rows])
    best = min(
        combinations(range(11), 7),
        key=lambda s: sorted((distances[i, j] for i, j in combinations(s, 2)), reverse=True),
    )
    close(aggregated("minimum_diameter", rows, 4), rows[list(best)].mean(axis=0))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "malicious"), [(6, 1), (11, 3), (20, 4)])
def test_caf(attack: str, count: int, malicious: int) -> None:
    rows = round_of(attack, count, malicious, size=30)
    counts, best, smallest = np.ones(count), np.zeros(30), np.inf
    while True:
        part = counts > 0
        mean = counts[part] @ rows[part] / counts.sum()
        away = rows[part] - mean
        covariance = (counts[part][:, None] * away).T @ away / counts.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < smallest:
            best, smallest = mean, values[-1]
        if counts.sum() <= count - 2 * malicious:
            break
        tau = (away @ vectors[:, -1]) ** 2
        shrink = 1 - tau / tau.max()
        shrink[shrink < 1e-12] = 0.0  # colluding clients lie on one point: all have the largest projection
        counts[part] *= shrink
    close(aggregated("caf", rows, malicious), best, 1e-5)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("iterations", "fixed"), [(10, None), (1, None), (25, 0.7)])
def test_centred_clipping(attack: str, iterations: int, fixed: float | None) -> None:
    rows = round_of(attack, 11, 3)
    centre = np.zeros(rows.shape[1])
    for _ in range(iterations):
        distances = np.linalg.norm(rows - centre, axis=1)
        radius = sorted(distances)[5] if fixed is None else fixed
        centre = centre + np.mean(
            [(row - centre) * min(1.0, radius / far) for row, far in zip(rows, distances, strict=True)],
            axis=0,
        )
    found = (
        aggregated("centred_clipping", rows, 3, iterations=iterations)
        if fixed is None
        else aggregated("centred_clipping", rows, 3, iterations=iterations, radius=fixed)
    )
    close(found, centre, 1e-5)


@pytest.mark.parametrize("attack", ATTACKS)
def test_fltrust(attack: str) -> None:
    rows, root = round_of(attack, 11, 3), round_of("none", 1, 0, seed=8)[0]
    trust = [max(0.0, row @ root / np.linalg.norm(row) / np.linalg.norm(root)) for row in rows]
    scaled = [row / np.linalg.norm(row) * np.linalg.norm(root) for row in rows]
    wanted = sum(t * row for t, row in zip(trust, scaled, strict=True)) / sum(trust)
    close(aggregated("fltrust", rows, 3, root=root), wanted)


@pytest.mark.parametrize("attack", ATTACKS)
def test_root_gate(attack: str) -> None:
    rows, root = round_of(attack, 11, 3), round_of("none", 1, 0, seed=8)[0]
    kept = [row / np.linalg.norm(row) * np.linalg.norm(root) for row in rows if row @ root > 0]
    close(aggregated("root_gate", rows, 3, root=root), np.sum(kept, axis=0) / 11)


@pytest.mark.parametrize("attack", ATTACKS)
def test_fltrust_caf(attack: str) -> None:
    """Updates at the root's norm, those that point its way; CAF of these, by the covariance itself."""
    rows, root = round_of(attack, 11, 3), round_of("none", 1, 0, seed=8)[0]
    reach = float(np.linalg.norm(root))
    scaled = np.stack([reach * row / np.linalg.norm(row) for row in rows])
    counts = np.array([1.0 if row @ root > 0 else 0.0 for row in rows])
    floor, best, smallest = counts.sum() * (1 - 2 * 3 / 11), counts / counts.sum(), np.inf
    while True:
        shares = counts / counts.sum()
        away = scaled - shares @ scaled
        values, directions = np.linalg.eigh((away.T * shares) @ away)
        if values[-1] * counts.sum() <= 1.5 * reach**2:
            best = shares
            break
        if values[-1] < smallest:
            best, smallest = shares, values[-1]
        if counts.sum() <= floor:
            break
        stretch = np.where(counts > 0, (away @ directions[:, -1]) ** 2, 0.0)
        counts = counts * (1 - stretch / stretch.max())
    close(aggregated("fltrust_caf", rows, 3, root=root), best @ scaled, 1e-4)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_majority_vote(attack: str, weighted: bool) -> None:
    rows = round_of(attack, 11, 3)
    weights = np.linspace(1.0, 1.5, 11) if weighted else np.ones(11)
    wanted = []
    for column in rows.T:
        order = np.argsort(np.abs(column))
        reached = np.cumsum(weights[order])
        middle = np.abs(column[order[np.searchsorted(reached, weights.sum() / 2)]])
        wanted.append(middle if weights @ np.sign(column) >= 0 else -middle)
    close(aggregated("majority_vote", rows, 3, weights), np.array(wanted))


def test_sign_deltas_of_one_scale_vote_for_a_sign_delta_and_a_tie_is_plus() -> None:
    rows = 0.25 * np.array([[1.0, -1, 1, -1], [1, -1, -1, 1], [1, 1, -1, -1], [1, -1, 1, -1]])
    assert aggregated("majority_vote", rows, 1).tolist() == [0.25, -0.25, 0.25, -0.25]


@pytest.mark.parametrize("attack", ATTACKS)
def test_clipping_by_norm(attack: str) -> None:
    rows = round_of(attack, 11, 3)
    norms = np.linalg.norm(rows, axis=1)

    def clipped(cap: float) -> Vectors:
        return np.array([row * min(1.0, cap / norm) for row, norm in zip(rows, norms, strict=True)])

    close(stepped("norm_cap", rows, 3), clipped(sorted(norms)[5]), 1e-12)
    close(stepped("norm_cap", rows, 3, max_norm=1.5), clipped(1.5), 1e-12)
    number = int(2 * 3 * (11 - 3) / 11)
    close(stepped("arc", rows, 3), clipped(sorted(norms)[-number - 1]), 1e-12)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nearest_neighbour_mixing(attack: str, weighted: bool) -> None:
    rows = round_of(attack, 11, 3)
    weights = np.linspace(1.0, 2.0, 11) if weighted else np.ones(11)
    wanted = []
    for index, row in enumerate(rows):
        distances = np.array([np.sum((row - other) ** 2) for other in rows])
        distances[index] = -1.0
        nearest = np.argsort(distances, kind="stable")[:8]
        wanted.append(weights[nearest] @ rows[nearest] / weights[nearest].sum())
    found = stepped("nnm", rows, 3, weights)
    scale = np.abs(wanted).max(axis=1, keepdims=True)
    close(found / scale, np.array(wanted) / scale, 1e-12)
