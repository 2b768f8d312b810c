"""Contribution methods on games whose Shapley values are known in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import CONTRIBUTIONS
from gym_fed.soup.building import build_contribution_method
from gym_fed.soup.contribution import Coalition, CountedGame, Game, GroupedGame, Scores, Vector

MEASURING = CONTRIBUTIONS.own_with("measures")

SHARING = ("gtg", "monte_carlo", "shapley")
"""Methods that share the value of all, whatever the game."""


class Table:
    """A game by formula."""

    def __init__(self, n: int, worth: dict[Coalition, float] | None = None) -> None:
        self.n = n
        self.worth = worth or {}

    def value(self, coalition: Coalition) -> float:
        return self.worth[coalition]


class Additive(Table):
    def value(self, coalition: Coalition) -> float:
        return float(sum(i - 1 for i in coalition))


class Gloves(Table):
    """Player 0 has a left glove, 1 and 2 right ones: pairs are worth 1, so 2/3, 1/6 and 1/6."""

    def value(self, coalition: Coalition) -> float:
        return float(0 in coalition and bool(coalition & {1, 2}))


class Majority(Table):
    """Worth 1 with more than 3 of the votes 3, 1, 1, 1: the first decides unless he comes first."""

    def value(self, coalition: Coalition) -> float:
        return float(sum(3 if i == 0 else 1 for i in coalition) > 3)


class Quadratic:
    """A round on a quadratic loss: updates ``[n, d]``, any symmetric Hessian."""

    def __init__(self, n: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.n = n
        self.updates = generator.normal(size=(n, 6))
        root = generator.normal(size=(6, 6))
        self.hessian = root @ root.T / 6
        self.gradient = generator.normal(size=6)

    def value(self, coalition: Coalition) -> float:
        step = self.updates[sorted(coalition)].sum(axis=0)
        return float(-self.gradient @ step - step @ self.hessian @ step / 2)

    def slopes(self, shares: Vector) -> Vector:
        found: Vector = -self.updates @ (self.gradient + self.hessian @ (shares @ self.updates))
        return found

    def chance(self) -> Vector:
        found: Vector = np.linalg.norm(self.updates, axis=1)
        return found


def score(name: str, game: Game, **options: object) -> Scores:
    return build_contribution_method(name, options).score(game)


@pytest.mark.parametrize("name", MEASURING)
def test_where_updates_do_not_touch_each_other_everyone_gets_what_he_adds(name: str) -> None:
    class Linear(Additive):
        def slopes(self, shares: Vector) -> Vector:
            return np.arange(self.n) - 1.0

        def chance(self) -> Vector:
            return np.zeros(self.n)

    options = {"truncation": 0} if name == "gtg" else {}
    np.testing.assert_allclose(score(name, Linear(5), **options).values, [-1, 0, 1, 2, 3], atol=1e-12)


@pytest.mark.parametrize(
    ("game", "expected"),
    [(Gloves(3), [2 / 3, 1 / 6, 1 / 6]), (Majority(4), [3 / 4, 1 / 12, 1 / 12, 1 / 12])],
    ids=["gloves", "majority"],
)
def test_known_shapley_values_are_found(game: Game, expected: list[float]) -> None:
    np.testing.assert_allclose(score("shapley", game).values, expected, atol=1e-12)
    for name in ("monte_carlo", "gtg"):
        found = score(name, game, budget=800, tolerance=0, truncation=0)
        np.testing.assert_allclose(found.values, expected, atol=0.04, err_msg=name)
        assert found.stopped == "budget"


@pytest.mark.parametrize("name", SHARING)
def test_scores_sum_to_the_value_of_all(name: str) -> None:
    game = Quadratic(6)
    found = score(name, game, **({} if name == "shapley" else {"truncation": 0}))
    assert found.values.sum() == pytest.approx(game.value(frozenset(range(6))))


@pytest.mark.parametrize("name", MEASURING)
def test_an_update_of_zeros_gets_exactly_nothing_and_twins_get_the_same(name: str) -> None:
    game = Quadratic(6)
    game.updates[2] = 0
    game.updates[4] = game.updates[1]
    found = score(name, game, **({"truncation": 0} if name == "gtg" else {}))
    assert found.values[2] == pytest.approx(0.0, abs=1e-12)
    if name in ("leave_one_out", "shapley", "estimate", "monte_carlo"):  # gtg samples its orders one by one
        assert found.values[4] == pytest.approx(found.values[1])


@pytest.mark.parametrize("name", ["estimate", "monte_carlo"])
def test_a_quadratic_games_shapley_values_cost_a_gradient_or_a_pair_of_orders(name: str) -> None:
    game = Quadratic(8)
    found = score(name, game, **({"budget": 1} if name == "monte_carlo" else {}))
    np.testing.assert_allclose(found.values, score("shapley", game).values, atol=1e-10)
    assert found.evaluations == (4 if name == "estimate" else 15 + 3)  # a gradient for what luck is worth


def test_more_points_follow_a_loss_that_is_not_quadratic() -> None:
    class Quartic(Table):
        """The first half together gain the fourth power of their number, the others what each adds."""

        def value(self, coalition: Coalition) -> float:
            first = sum(i < 4 for i in coalition)
            return (first / 4) ** 4 + (len(coalition) - first) / 4

        def slopes(self, shares: Vector) -> Vector:
            return np.where(np.arange(8) < 4, shares[:4].mean() ** 3, 0.25)

        def chance(self) -> Vector:
            return np.zeros(8)

    one, two = (score("estimate", Quartic(8), points=points) for points in (1, 2))
    np.testing.assert_allclose(two.values, 0.25)
    np.testing.assert_allclose(score("shapley", Quartic(8)).values, 0.25)
    assert two.evaluations == one.evaluations + 3
    assert one.values[0] < 0.2


@pytest.mark.parametrize("name", MEASURING)
def test_the_same_game_gets_the_same_scores(name: str) -> None:
    first, second = score(name, Quadratic(5)), score(name, Quadratic(5))
    assert first.values.tobytes() == second.values.tobytes()
    assert first.evaluations == second.evaluations


@pytest.mark.parametrize("name", ["gtg", "monte_carlo"])
def test_another_seed_draws_other_orders_and_a_budget_ends_them(name: str) -> None:
    options = {"budget": 6, "tolerance": 0, "truncation": 0}
    few, other = (score(name, Gloves(3), seed=seed, **options) for seed in (0, 3))
    assert few.evaluations <= 7  # the coalitions of three
    assert few.values.tolist() != other.values.tolist() or name == "monte_carlo"
    assert score(name, Quadratic(12), **options).evaluations < 2**12 / 10


@pytest.mark.parametrize("name", ["gtg", "monte_carlo"])
def test_an_order_is_cut_off_where_nothing_is_left_to_add(name: str) -> None:
    class Enough(Table):
        """The contributor that comes first gives all there is."""

        def value(self, coalition: Coalition) -> float:
            return float(bool(coalition))

    options = {"budget": 40, "tolerance": 0}
    whole = score(name, Enough(9), truncation=0, **options).evaluations
    cut = score(name, Enough(9), truncation=0.01, **options).evaluations
    assert cut == 10 < whole


def test_a_round_that_changed_nothing_costs_gtg_one_evaluation() -> None:
    found = score("gtg", Table(4, {frozenset(range(4)): 5e-5}))
    assert found.evaluations == 1
    assert not found.values.any()
    with pytest.raises(KeyError):
        score("gtg", Table(4, {frozenset(range(4)): 5e-5}), round_truncation=0)


def test_monte_carlo_stops_when_it_knows_enough() -> None:
    rough, fine = (score("monte_carlo", Majority(4), budget=10**6, tolerance=t) for t in (0.3, 0.1))
    assert rough.stopped == fine.stopped == "tolerance"
    assert rough.errors is not None
    assert fine.errors is not None
    assert fine.errors.max() < rough.errors.max()


@pytest.mark.parametrize("name", MEASURING)
def test_what_luck_is_worth_is_reported_where_the_game_knows_gradients(name: str) -> None:
    game = Quadratic(4)
    chance = score(name, GroupedGame(CountedGame(game), [[0, 1], [2], [3]])).chance
    assert chance is not None
    np.testing.assert_allclose(chance, [game.chance()[:2].sum(), *game.chance()[2:]])
    if name != "estimate":
        assert score(name, CountedGame(Gloves(3))).chance is None


def test_exact_scores_of_a_large_round_are_refused() -> None:
    with pytest.raises(GymError, match="2047 evaluations; max_players is 10") as refused:
        score("shapley", Additive(11))
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert score("shapley", Additive(11), max_players=11).evaluations == 2047


def test_what_is_not_finite_or_has_no_gradient_is_refused() -> None:
    everyone = frozenset({0, 1})
    with pytest.raises(GymError, match=r"updates \[0, 1\] has a value that is not finite"):
        score("leave_one_out", Table(2, {everyone: float("nan")}))
    with pytest.raises(GymError, match="Gloves supports only whole updates"):
        score("estimate", Gloves(3))


def test_a_group_of_copies_is_one_player() -> None:
    game = Quadratic(4)
    game.updates = np.vstack([game.updates, game.updates[3] / 2])
    game.updates[3] /= 2
    game.n = 5
    split = GroupedGame(game, [[0], [1], [2], [3, 4]])
    np.testing.assert_allclose(score("shapley", split).values, score("estimate", split).values, atol=1e-10)
    assert score("shapley", split).values[3] == pytest.approx(score("shapley", game).values[3:].sum())
    with pytest.raises(GymError, match="each of 5 players exactly once"):
        GroupedGame(game, [[0], [1]])


def test_a_game_is_asked_once_and_may_be_stopped() -> None:
    class Enough(Exception):
        pass

    def stop(evaluations: int) -> None:
        if evaluations == 3:
            raise Enough

    counted = CountedGame(Additive(3), stop)
    assert counted.value(frozenset({1})) == counted.value(frozenset({1})) == 0.0
    assert counted.evaluations == 1
    with pytest.raises(Enough):
        score("shapley", counted)
    assert counted.evaluations == 3


def test_unknown_methods_and_settings_are_named() -> None:
    with pytest.raises(GymError, match=r"unknown contribution score 'banzhaf' \(one of estimate, gtg"):
        CONTRIBUTIONS.type_of("banzhaf")
    with pytest.raises(GymError, match="budgets"):
        build_contribution_method("gtg", {"budgets": 3})
