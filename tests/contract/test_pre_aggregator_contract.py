"""What every step before aggregation must do; a file dropped into gym_fed/soup/pre_aggregators is tested here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import PRE_AGGREGATORS
from gym_fed.soup.building import build_pre_aggregators
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.pre_aggregator import PreAggregator

NAMES = PRE_AGGREGATORS.names()
BY_PLACE = {"bucketing"}
"""Steps in which a contributor's place in the round decides."""


def step(name: str, malicious: int = 0, **options: bool | int | float | str) -> PreAggregator:
    recipe = SoupRecipe(
        aggregator="median",
        pre_aggregators=[name],
        pre_aggregator_options={name: options},
        num_malicious_nodes=malicious,
    )
    return build_pre_aggregators(recipe)[0]


def updates_of(count: int, size: int = 120, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def test_the_steps_of_this_release_are_registered() -> None:
    assert set(NAMES) >= {"arc", "bucketing", "equal_norm", "nnm", "norm_cap"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "malicious"), [(1, 0), (5, 0), (5, 1), (20, 4)])
def test_as_many_vectors_go_on_as_the_step_says(name: str, count: int, malicious: int) -> None:
    made = step(name, malicious)
    combination = made.mix(GramMatrix.of(updates_of(count), torch.ones(count)))
    assert combination.matrix.shape == (made.rows(count), count)
    assert combination.weights.shape == (made.rows(count),)
    assert combination.matrix.dtype == combination.weights.dtype == torch.float64
    assert bool((combination.weights > 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_on_are_combinations_of_the_updates_and_they_stay_as_they_were(name: str) -> None:
    updates, weights = updates_of(9), torch.arange(1.0, 10.0)
    before = updates.clone()
    vectors, their_weights = step(name, 2).apply(updates, weights)
    combination = step(name, 2).mix(GramMatrix.of(updates, weights))
    torch.testing.assert_close(vectors, combination.matrix @ updates.double(), rtol=0, atol=1e-12)
    assert torch.equal(their_weights, combination.weights)
    assert torch.equal(updates, before)
    assert bool((combination.matrix >= 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_equal_updates_go_on_as_they_are(name: str) -> None:
    update = updates_of(1)
    vectors, _ = step(name, 2).apply(update.repeat(9, 1), torch.ones(9))
    torch.testing.assert_close(vectors, update.double().expand_as(vectors), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1024.0, 1e-6])
def test_larger_updates_go_on_larger_alike(name: str, factor: float) -> None:
    updates = updates_of(9).double()
    vectors, _ = step(name, 2).apply(updates, torch.ones(9))
    scaled, _ = step(name, 2).apply(updates * factor, torch.ones(9))
    torch.testing.assert_close(scaled, vectors * factor, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_PLACE])
def test_the_order_of_contributors_does_not_matter(name: str) -> None:
    updates, weights = updates_of(9), torch.arange(1.0, 10.0)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    vectors, kept = step(name, 2).apply(updates, weights)
    shuffled, kept_too = step(name, 2).apply(updates[order], weights[order])
    torch.testing.assert_close(shuffled, vectors[order], rtol=1e-12, atol=1e-12)
    assert torch.equal(kept_too, kept[order])


@pytest.mark.parametrize(
    "name", [name for name in NAMES if PRE_AGGREGATORS.type_of(name).needs <= Needs.NORMS]
)
def test_a_step_that_needs_norms_looks_at_nothing_else(name: str) -> None:
    full = GramMatrix.of(updates_of(9), torch.ones(9))
    bare = GramMatrix(torch.diag(full.products.diagonal()), full.weights)
    given, wanted = step(name, 2).mix(bare), step(name, 2).mix(full)
    assert torch.equal(given.matrix, wanted.matrix)
    assert torch.equal(given.weights, wanted.weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "updates",
    [
        torch.zeros(9, 40),
        torch.cat([torch.full((2, 40), 3e38), updates_of(7, 40)]),
        torch.cat([torch.zeros(6, 40), updates_of(3, 40)]),
        updates_of(9, 40) * 1e-44,
        torch.outer(torch.linspace(-1, 1, 9), torch.ones(40)),
    ],
    ids=["zeros", "largest", "mostly zeros", "smallest", "a line"],
)
def test_no_finite_updates_make_vectors_that_are_not(name: str, updates: Tensor) -> None:
    vectors, _ = step(name, 2).apply(updates, torch.ones(9))
    assert bool(torch.isfinite(vectors).all())


@pytest.mark.parametrize("name", NAMES)
def test_malicious_updates_at_1e30_cost_the_honest_no_digits(name: str) -> None:
    """Vectors that hold nothing of a malicious client are as they would be without their size."""
    honest = updates_of(7)
    huge = torch.cat([torch.full((2, 120), 1e30), honest])
    gram = GramMatrix.of(huge, torch.ones(9))
    combination = step(name, 2).mix(gram)
    clean = (combination.matrix[:, :2] == 0).all(dim=1)
    wanted = combination.matrix[clean][:, 2:] @ honest.double()
    torch.testing.assert_close(combination.applied(huge)[clean], wanted, rtol=1e-12, atol=1e-12)
    distances = gram.combined(combination).squared_distances()[clean][:, clean]
    torch.testing.assert_close(distances, torch.cdist(wanted, wanted).square(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_gram_matrix_of_what_goes_on_is_that_of_the_vectors(name: str) -> None:
    updates, root = updates_of(9), updates_of(1, seed=3)[0]
    gram = GramMatrix.of(updates, torch.ones(9), root)
    combination = step(name, 2).mix(gram)
    found, wanted = (
        gram.combined(combination),
        GramMatrix.of(combination.applied(updates), combination.weights, root.double()),
    )
    torch.testing.assert_close(found.products, wanted.products, rtol=1e-10, atol=1e-10)
    assert found.root is not None
    assert wanted.root is not None
    torch.testing.assert_close(found.root, wanted.root, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_a_step_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(GymError, match="colour: unknown key") as caught:
        step(name, colour="red")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def _factors(combination: CombinationWeights) -> list[float]:
    assert torch.equal(combination.matrix, torch.diag(combination.matrix.diagonal()))
    return combination.matrix.diagonal().tolist()


def _of_norms(*norms: float) -> GramMatrix:
    return GramMatrix.of(torch.diag(torch.tensor(norms)), torch.ones(len(norms)))


@pytest.mark.parametrize("name", ["norm_cap", "arc"])
def test_clipping_leaves_updates_of_equal_norm_alone_to_the_bit(name: str) -> None:
    assert _factors(step(name, 2).mix(_of_norms(*[0.3] * 7))) == [1.0] * 7


def test_a_norm_cap_is_the_lower_median_unless_a_quantile_or_a_norm_is_given() -> None:
    norms = _of_norms(1.0, 2.0, 4.0, 8.0)
    assert _factors(step("norm_cap").mix(norms)) == [1.0, 1.0, 0.5, 0.25]
    assert _factors(step("norm_cap", quantile=0.0).mix(norms)) == [1.0, 0.5, 0.25, 0.125]
    assert _factors(step("norm_cap", quantile=1.0).mix(norms)) == [1.0] * 4
    assert _factors(step("norm_cap", max_norm=4.0).mix(norms)) == [1.0, 1.0, 1.0, 0.5]
    with pytest.raises(GymError, match="two ways to set the cap"):
        step("norm_cap", max_norm=4.0, quantile=0.5)


def test_a_quantile_that_malicious_clients_could_set_is_refused() -> None:
    step("norm_cap", 4, quantile=0.8).rows(20)
    with pytest.raises(
        GymError, match=r"norm of a malicious client \(num_malicious_nodes: 4\).*lower quantile to 0.78"
    ) as caught:
        step("norm_cap", 4, quantile=0.9).rows(20)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_arc_clips_more_updates_than_lie() -> None:
    """n = 10, f = 2: floor(2 * 0.2 * 8) = 3 are clipped to the fourth largest."""
    factors = _factors(step("arc", 2).mix(_of_norms(*[2.0**k for k in range(10)])))
    assert factors == [1.0] * 7 + [0.5, 0.25, 0.125]
    assert _factors(step("arc").mix(_of_norms(1.0, 2.0))) == [1.0, 1.0]


def test_arc_and_mixing_need_honest_updates() -> None:
    for name, count, message in (("arc", 4, "needs 5"), ("nnm", 2, "needs 3 updates, not 2")):
        with pytest.raises(GymError, match=message) as caught:
            step(name, 2).rows(count)
        assert caught.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match=r"num_neighbours: 5 .* needs 7 updates, not 6"):
        step("nnm", 2, num_neighbours=5).rows(6)


def test_mixing_weighs_the_nearest_and_keeps_the_order_of_equal_ones() -> None:
    rows = torch.tensor([[0.0], [1.0], [-1.0], [10.0]])
    combination = step("nnm", num_neighbours=2).mix(GramMatrix.of(rows, torch.tensor([1.0, 3.0, 1.0, 1.0])))
    wanted = [[0.25, 0.75, 0, 0], [0.25, 0.75, 0, 0], [0.5, 0, 0.5, 0], [0, 0.75, 0, 0.25]]
    assert combination.matrix.tolist() == wanted
    assert combination.weights.tolist() == [1.0, 3.0, 1.0, 1.0]
    everything = step("nnm").mix(GramMatrix.of(rows, torch.ones(4)))
    assert everything.matrix.tolist() == [[0.25] * 4] * 4
    copies = step("nnm", num_neighbours=1).mix(GramMatrix.of(torch.ones(3, 2), torch.ones(3)))
    assert torch.equal(copies.matrix, torch.eye(3, dtype=torch.float64))


def test_buckets_share_all_updates_among_them_by_weight() -> None:
    weights = torch.arange(1.0, 8.0)
    combination = step("bucketing", bucket_size=3).mix(GramMatrix.of(updates_of(7), weights))
    assert (combination.matrix > 0).sum(dim=1).tolist() == [3, 3, 1]
    assert (combination.matrix > 0).sum(dim=0).tolist() == [1] * 7
    torch.testing.assert_close(combination.weights @ combination.matrix, weights.double())
    torch.testing.assert_close(combination.matrix.sum(dim=1), torch.ones(3, dtype=torch.float64))


def test_buckets_follow_from_the_seed_and_the_count_alone() -> None:
    one = step("bucketing", seed=1).mix(GramMatrix.of(updates_of(8), torch.ones(8)))
    same = step("bucketing", seed=1).mix(GramMatrix.of(updates_of(8, seed=9), torch.ones(8)))
    other = step("bucketing", seed=2).mix(GramMatrix.of(updates_of(8), torch.ones(8)))
    assert torch.equal(one.matrix, same.matrix)
    assert not torch.equal(one.matrix, other.matrix)
    # sha256("1:8:0") to sha256("1:8:7") in ascending order: what a replay in another language must find.
    assert [row.nonzero()[:, 0].tolist() for row in one.matrix] == [[0, 6], [1, 5], [4, 7], [2, 3]]


def test_too_few_buckets_are_refused_with_the_updates_they_take() -> None:
    assert step("bucketing", 2).rows(9) == 5
    with pytest.raises(
        GymError, match=r"8 updates make 4 buckets .* needs 5 buckets, or 9 updates"
    ) as caught:
        step("bucketing", 2).rows(8)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_the_first_quantile_that_a_malicious_client_could_set_is_refused_and_the_one_below_is_not() -> None:
    """Of 20 norms in order, the last four may be malicious: number 16 from 0 is the first of them."""
    norms = _of_norms(*[1.0] * 16, *[1e6] * 4)
    assert max(step("norm_cap", 4, quantile=15 / 19).mix(norms).matrix.diagonal().tolist()) == 1.0
    for last in (16 / 19 + 1e-9, 1.0):
        made = step("norm_cap", 4, quantile=last)
        for call in (lambda made=made: made.rows(20), lambda made=made: made.mix(norms)):
            with pytest.raises(GymError, match=r"norm of a malicious client \(num_malicious_nodes: 4\)"):
                call()


@pytest.mark.parametrize("name", ["equal_norm", "norm_cap"])
@pytest.mark.parametrize("count", [2, 4, 5, 8, 9])
def test_as_many_malicious_clients_as_a_median_withstands_set_no_norm(name: str, count: int) -> None:
    """Of an even number the lower of the middle two is taken: f of n >= 2f + 1 never reach it."""
    malicious = (count - 1) // 2
    honest = [1.0 + k / 10 for k in range(count - malicious)]
    updates = _of_norms(*honest, *[1e9] * malicious)
    lengths = [
        f * n
        for f, n in zip(
            _factors(step(name, malicious).mix(updates)), [*honest, *[1e9] * malicious], strict=True
        )
    ]
    assert max(lengths) <= max(honest) * (1 + 1e-6)
    if name == "equal_norm":
        expected = sorted([*honest, *[1e9] * malicious])[(count - 1) // 2]
        assert lengths == pytest.approx([expected] * count)
