"""Merge methods against the formulas of their papers, written out in numpy, float64, element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import METHODS
from gym_fed.soup.building import build
from gym_fed.soup.method import TensorTask
from gym_fed.soup.methods._task_vectors import draws

WEIGHTS = [1.0, 2.5, 0.5, 1.0]


def deltas_of(
    count: int, rows: int = 7, cols: int = 12, seed: int = 0, decimals: int | None = None
) -> np.ndarray:
    """``decimals`` makes ties."""
    found = np.random.default_rng(seed).normal(size=(count, rows, cols)).astype(np.float32)
    return found if decimals is None else found.round(decimals).astype(np.float32)


def merged(
    name: str,
    deltas: np.ndarray,
    weights: Sequence[float] | None = None,
    statistics: Sequence[np.ndarray] = (),
    **settings: Any,
) -> np.ndarray:
    given = torch.tensor(list(weights or [1.0] * len(deltas)), dtype=torch.float64)
    stats = tuple(torch.from_numpy(s) for s in statistics)
    task = TensorTask("a tensor", torch.from_numpy(deltas), given, statistics=stats)
    return build(METHODS.type_of(name), settings, "settings").merge_tensor(task).numpy()


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of the largest, by a full sort; equal ones by index."""
    order = sorted(range(values.size), key=lambda i: (-abs(values.flat[i]), i))
    mask = np.zeros(values.size, bool)
    mask[order[:count]] = True
    return mask.reshape(values.shape)


def elect_and_mean(deltas: np.ndarray, votes: Sequence[float], weights: Sequence[float]) -> np.ndarray:
    result = np.zeros(deltas.shape[1:])
    for place in np.ndindex(result.shape):
        values = [float(d[place]) for d in deltas]
        sign = np.sign(math.fsum(v * vote for v, vote in zip(values, votes, strict=True)))
        agreeing = [(v, w) for v, w in zip(values, weights, strict=True) if sign and np.sign(v) == sign]
        if agreeing:
            result[place] = sum(v * w for v, w in agreeing) / sum(w for _, w in agreeing)
    return result


def test_linear_is_the_weighted_mean() -> None:
    deltas = deltas_of(4)
    close(merged("linear", deltas, WEIGHTS), np.average(deltas.astype(float), axis=0, weights=WEIGHTS))


def test_task_arithmetic_is_the_weighted_sum_times_lambda() -> None:
    deltas = deltas_of(4)
    wanted = 0.4 * np.tensordot(WEIGHTS, deltas.astype(float), axes=1)
    close(merged("task_arithmetic", deltas, WEIGHTS, scale=0.4), wanted)


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("decimals", [None, 0])
def test_ties_trims_elects_and_merges(density: float, decimals: int | None) -> None:
    deltas = deltas_of(4, decimals=decimals)
    kept = np.stack([np.where(top(d, math.ceil(density * d.size)), d, 0).astype(float) for d in deltas])
    close(merged("ties", deltas, WEIGHTS, density=density), elect_and_mean(kept, WEIGHTS, WEIGHTS))


def test_ties_leaves_out_what_cancels_exactly() -> None:
    deltas = np.array([[[1.0, 3.0]], [[-1.0, -1.0]]], np.float32)
    close(merged("ties", deltas, density=1.0), np.array([[0.0, 3.0]]))


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_drops_and_rescales(name: str) -> None:
    deltas, density = deltas_of(4), 0.3
    uniform = [draws(9, "a tensor", i, torch.Size((7, 12))).numpy() for i in range(4)]
    kept = np.stack(
        [np.where(u < density, d.astype(float) / density, 0) for d, u in zip(deltas, uniform, strict=True)]
    )
    wanted = (
        np.average(kept, axis=0, weights=WEIGHTS)
        if name == "dare_linear"
        else elect_and_mean(kept, WEIGHTS, WEIGHTS)
    )
    close(merged(name, deltas, WEIGHTS, density=density, seed=9), wanted)


def test_dare_keeps_the_configured_share_and_the_expectation() -> None:
    ones = np.ones((1, 300, 300), np.float32)
    found = merged("dare_linear", ones, density=0.1)
    assert set(np.unique(found)) == {np.float32(0.0), np.float32(10.0)}
    assert found.mean() == pytest.approx(1.0, abs=5 * 10 * math.sqrt(0.1 * 0.9 / ones.size))


def test_draws_of_models_and_tensors_do_not_repeat_each_other() -> None:
    shape = torch.Size((100,))
    found = [draws(*key, shape) for key in ((0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0))]
    for one, other in itertools.combinations(found, 2):
        assert not bool((one == other).any())


def test_draws_are_these_on_every_machine() -> None:
    found = draws(0, "model.embed_tokens.weight", 1, torch.Size((4,)))
    wanted = [0.8756563067436218, 0.8581376075744629, 0.9522689580917358, 0.11446809768676758]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("elect_signs", [True, False])
@pytest.mark.parametrize("decimals", [None, 0])
def test_della_drops_the_smaller_of_a_row_more_often_and_rescales_each_by_its_own_odds(
    elect_signs: bool, decimals: int | None
) -> None:
    deltas, density, epsilon = deltas_of(4, decimals=decimals), 0.6, 0.3
    kept = np.zeros(deltas.shape)
    for i, delta in enumerate(deltas):
        uniform = draws(0, "a tensor", i, torch.Size((7, 12))).numpy()
        for row in range(7):
            ranked = sorted(range(12), key=lambda c, values=delta[row]: (-abs(values[c]), c))
            for rank, col in enumerate(ranked):
                dropped = (1 - density) - epsilon / 2 + epsilon * rank / 12
                if uniform[row, col] < 1 - dropped:
                    kept[i, row, col] = float(delta[row, col]) / (1 - dropped)
    wanted = (
        elect_and_mean(kept, WEIGHTS, WEIGHTS) if elect_signs else np.average(kept, axis=0, weights=WEIGHTS)
    )
    close(merged("della", deltas, WEIGHTS, density=density, epsilon=epsilon, elect_signs=elect_signs), wanted)


@pytest.mark.parametrize(("density", "epsilon"), [(0.1, 0.2), (0.95, 0.2)])
def test_della_refuses_probabilities_that_are_none(density: float, epsilon: float) -> None:
    with pytest.raises(GymError, match="must lie above 0") as caught:
        merged("della", deltas_of(2), density=density, epsilon=epsilon)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(("smallest", "largest"), [(0.85, 0.007), (0.5, 0.25), (0.0, 0.1), (0.9, 0.0)])
@pytest.mark.parametrize("decimals", [None, 0])
def test_breadcrumbs_keeps_the_middle(smallest: float, largest: float, decimals: int | None) -> None:
    deltas = deltas_of(3, 10, 10, decimals=decimals)
    total = np.zeros((10, 10))
    for delta in deltas:
        order = sorted(range(100), key=lambda i, d=delta: (-abs(d.flat[i]), i))
        middle = order[math.floor(100 * largest) : 100 - round(100 * smallest)]
        total.flat[middle] += delta.astype(float).flat[middle]
    close(merged("breadcrumbs", deltas, scale=0.3, smallest=smallest, largest=largest), 0.3 * total)


def test_breadcrumbs_refuses_to_drop_all() -> None:
    with pytest.raises(GymError, match="leave nothing"):
        merged("breadcrumbs", deltas_of(2), smallest=0.6, largest=0.4)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_model_stock_interpolates_by_the_angle(count: int) -> None:
    deltas = deltas_of(count) + 0.8 * deltas_of(1, seed=9)
    flat = deltas.reshape(count, -1).astype(float)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(flat, 2)]
    cosine = np.mean(cosines)
    assert cosine > 0
    t = count * cosine / (1 + (count - 1) * cosine)
    close(merged("model_stock", deltas), t * deltas.astype(float).mean(axis=0))


def test_model_stock_of_two_equally_long_deltas_is_the_foot_of_the_perpendicular() -> None:
    """Fig. 4 of the paper: seen from the centre w_H, base and fine-tunes lie at right angles to their plane."""
    one, other = deltas_of(2).astype(float)
    other = (one + other) * np.linalg.norm(one) / np.linalg.norm(one + other)
    stock = merged("model_stock", np.stack([one, other]).astype(np.float32)).astype(float)
    assert float((stock * (one - other)).sum()) == pytest.approx(0.0, abs=1e-4)
    assert 0 < np.linalg.norm(stock) < np.linalg.norm((one + other) / 2)


def test_model_stock_falls_back_to_the_base_where_models_oppose_each_other() -> None:
    delta = deltas_of(1)[0]
    assert not merged("model_stock", np.stack([delta, -0.5 * delta])).any()


@pytest.mark.parametrize("select", [0.05, 0.4, 1.0])
def test_sce_selects_calculates_and_erases(select: float) -> None:
    deltas = deltas_of(4)
    deltas[:, 0] = deltas[0, 0]  # a row in which the models agree
    exact = deltas.astype(float)
    variance = exact.var(axis=0)
    variance[0] = 0.0
    mask = top(variance, math.ceil(select * variance.size)) & ((variance > 0) | (select == 1.0))
    chosen = np.where(mask, exact, 0.0)
    squares = (chosen**2).sum(axis=(1, 2))
    wanted = elect_and_mean(chosen, [1.0] * 4, list(squares / squares.sum()))
    close(merged("sce", deltas, select=select), wanted)


def angle(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one / np.linalg.norm(one), other / np.linalg.norm(other)
    return 2 * math.atan2(float(np.linalg.norm(one - other)), float(np.linalg.norm(one + other)))


@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
def test_karcher_minimises_the_mean_squared_angle_and_keeps_the_mean_norm(spread: float) -> None:
    deltas = (deltas_of(1, 2, 3, seed=3) + spread * deltas_of(4, 2, 3)).astype(np.float32)
    flat, shares = deltas.reshape(4, -1).astype(float), np.array(WEIGHTS) / sum(WEIGHTS)

    def cost(direction: np.ndarray) -> float:
        return float(sum(s * angle(direction, d) ** 2 for s, d in zip(shares, flat, strict=True)))

    found = merged("karcher", deltas, WEIGHTS).astype(float).ravel()
    best = minimize(
        cost, found + 0.1, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 9999}
    )
    assert cost(found) <= best.fun + 1e-9
    assert np.linalg.norm(found) == pytest.approx(float(shares @ np.linalg.norm(flat, axis=1)), rel=1e-6)


def test_karcher_of_two_is_spherical_interpolation() -> None:
    one, other = (d.astype(float) for d in deltas_of(2))
    omega, t = angle(one, other), 0.25
    direction = (
        math.sin((1 - t) * omega) * one / np.linalg.norm(one)
        + math.sin(t * omega) * other / np.linalg.norm(other)
    ) / math.sin(omega)
    norm = (1 - t) * np.linalg.norm(one) + t * np.linalg.norm(other)
    close(merged("karcher", deltas_of(2), [3.0, 1.0]), direction * norm)


def test_karcher_without_a_common_direction_is_zero_and_the_heavier_of_two_opposite_ones_wins() -> None:
    delta = deltas_of(1)[0]
    assert not merged("karcher", np.stack([delta, -delta])).any()
    close(merged("karcher", np.stack([delta, -delta]), [2.0, 1.0]), delta.astype(float))


def test_karcher_with_opposite_and_equal_directions_still_converges() -> None:
    one, other = deltas_of(2)
    found = merged("karcher", np.stack([one, one, -one, other]), [1.0, 1.0, 0.5, 1.0])
    assert 0 < angle(found, one) < angle(found, -one)


def test_karcher_says_when_it_has_not_converged() -> None:
    with pytest.raises(GymError, match=r"'a tensor'.*2 iterations") as caught:
        merged("karcher", deltas_of(3) - 0.9 * deltas_of(1), max_iterations=2)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_fisher_weighs_each_element_by_its_information() -> None:
    deltas = deltas_of(4)
    information = np.random.default_rng(1).exponential(1e-3, size=deltas.shape).astype(np.float32)
    information[1, :3] = 0.0
    sure = np.array(WEIGHTS)[:, None, None] * np.maximum(information.astype(float), 1e-4)
    wanted = (sure * deltas).sum(axis=0) / sure.sum(axis=0)
    close(merged("fisher", deltas, WEIGHTS, list(information), floor=1e-4), wanted)


def test_fisher_without_any_information_is_the_mean() -> None:
    deltas = deltas_of(4)
    found = merged("fisher", deltas, WEIGHTS, list(np.zeros_like(deltas)))
    close(found, np.average(deltas.astype(float), axis=0, weights=WEIGHTS))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_regmean_on_deltas_is_regmean_on_weights(alpha: float) -> None:
    """Eq. 2 of the paper for whole weights, transposed as it is written there, minus the base."""
    rng = np.random.default_rng(2)
    deltas, base = deltas_of(3), rng.normal(size=(7, 12))
    inputs = [rng.normal(size=(50, 12)) @ rng.normal(size=(12, 12)) for _ in range(3)]
    gram = [x.T @ x for x in inputs]
    shrunk = [alpha * g + (1 - alpha) * np.diag(np.diag(g)) for g in gram]
    right = sum(g @ (base + d).T for g, d in zip(shrunk, deltas.astype(float), strict=True))
    wanted = np.linalg.solve(sum(shrunk), right).T - base
    tokens = [50.0] * 3
    means = [(g / 50).astype(np.float32) for g in gram]
    found = merged("regmean", deltas, tokens, means, alpha=alpha, floor=1e-12)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_regmean_answers_better_than_the_mean() -> None:
    rng = np.random.default_rng(3)
    deltas = deltas_of(2)
    inputs = [rng.normal(size=(40, 12)) * scale for scale in (np.linspace(0, 3, 12), np.linspace(3, 0, 12))]
    gram = [(x.T @ x / 40).astype(np.float32) for x in inputs]

    def error(delta: np.ndarray) -> float:
        return sum(float(np.square(x @ (delta - d).T).sum()) for x, d in zip(inputs, deltas, strict=True))

    assert error(merged("regmean", deltas, None, gram, alpha=1.0)) < 0.5 * error(deltas.mean(axis=0))


def test_regmean_takes_the_mean_of_columns_that_no_text_reached() -> None:
    deltas = deltas_of(2)
    x = np.random.default_rng(4).normal(size=(2, 30, 12))
    x[:, :, 5] = 0.0
    gram = [(a.T @ a / 30).astype(np.float32) for a in x]
    found = merged("regmean", deltas, None, gram)
    np.testing.assert_allclose(found[:, 5], deltas.astype(float).mean(axis=0)[:, 5], rtol=1e-5)


def soup(scores: dict[tuple[int, ...], float], count: int, vetoed: Sequence[tuple[int, ...]] = ()) -> Any:
    """A greedy soup's choice; candidates are named by the models in them."""
    built = build(METHODS.type_of("greedy_soup"), {}, "settings")

    def members(coefficients: torch.Tensor) -> tuple[int, ...]:
        inside = tuple(int(i) for i in coefficients.nonzero()[:, 0])
        assert torch.equal(
            coefficients[list(inside)], torch.full((len(inside),), 1 / len(inside), dtype=torch.float64)
        )
        return inside

    chosen = built.choose(
        torch.ones(count, dtype=torch.float64),
        lambda c: scores[members(c)],
        lambda c: "unsafe" if members(c) in vetoed else None,
    )
    return members(chosen), built


SCORES = {(0,): 0.5, (1,): 0.7, (2,): 0.6, (1, 2): 0.7, (0, 1, 2): 0.65, (0, 1): 0.8, (0, 2): 0.1}


def test_the_greedy_soup_takes_models_in_order_of_score_while_it_gets_no_worse() -> None:
    chosen, built = soup(SCORES, 3)
    assert chosen == (1, 2)
    steps = built.report()["steps"]
    assert [step["model"] for step in steps] == [1, 2, 0]
    assert [step["refused"] for step in steps] == ["", "", "the soup would score 0.65, not 0.7"]
    deltas = deltas_of(3)
    task = TensorTask("a tensor", torch.from_numpy(deltas), torch.ones(3, dtype=torch.float64))
    close(built.merge_tensor(task).numpy(), deltas[1:].astype(float).mean(axis=0))


def test_the_gate_has_the_last_word() -> None:
    chosen, built = soup(SCORES, 3, vetoed=[(1, 2)])
    assert chosen == (0, 1)
    assert [step["refused"] for step in built.report()["steps"]] == ["", "unsafe", ""]


def test_a_model_whose_score_is_no_number_stays_out() -> None:
    chosen, built = soup(
        {**SCORES, (1,): float("nan"), (1, 2): float("nan"), (0, 2): 0.6, (0, 1, 2): float("nan")}, 3
    )
    assert chosen == (0, 2)
    assert built.report()["steps"][-1] == {
        "model": 1, "alone": None, "score": None, "refused": "has no finite score"
    }  # fmt: skip


def test_a_soup_of_no_model_is_refused_with_the_reasons() -> None:
    with pytest.raises(GymError, match=r"1: unsafe; 2: unsafe; 0: unsafe") as caught:
        soup(SCORES, 3, vetoed=[(0,), (1,), (2,)])
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


def test_a_greedy_soup_that_has_not_chosen_merges_nothing() -> None:
    with pytest.raises(GymError, match="call choose for 2 models before merging"):
        merged("greedy_soup", deltas_of(2))


def test_ties_and_task_arithmetic_are_those_of_peft() -> None:
    from peft.utils import merge_utils

    deltas = deltas_of(4)
    tensors, ones = list(torch.from_numpy(deltas)), torch.ones(4)
    ties = merge_utils.ties(tensors, ones, density=0.5, majority_sign_method="total")
    np.testing.assert_allclose(merged("ties", deltas, density=0.5), ties.numpy(), rtol=1e-6, atol=1e-7)
    halves = merge_utils.task_arithmetic(tensors, torch.full((4,), 0.5))
    found = merged("task_arithmetic", deltas, [0.5] * 4)
    np.testing.assert_allclose(found, halves.numpy(), rtol=1e-6, atol=1e-7)
