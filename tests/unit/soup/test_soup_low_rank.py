"""LoRA updates as factors: products, combinations and adapters of a rank, against the matrices they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gym_quant import Params
from gym_quant.codecs.lora import Lora
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, PRE_AGGREGATORS
from gym_fed.delta.manifest import TensorRecord
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.low_rank import LowRank, combine, frozen_a, products, refactor, rows_of
from gym_fed.soup.pipeline import Pipeline

LORA = Lora()
ROWS, COLS = 24, 20
RANKS = (1, 4, 16, 30, None, 4, 1)
"""Of a round's contributors: one leaves the tensor out, and 30 is more than either side."""

WEIGHING = [
    (name, malicious)
    for name in AGGREGATORS.names()
    for malicious in (0, 1)
    if issubclass(AGGREGATORS.type_of(name), WeightRule)
    and AGGREGATORS.type_of(name).needs is not Needs.ROOT
    and (AGGREGATORS.type_of(name).robust or not malicious)
]
"""Rules whose result is a combination of the updates, and the malicious clients they are to withstand."""


def factors_of(rank: int, seed: int, spread: float = 0.0, rows: int = ROWS, cols: int = COLS) -> LowRank:
    """Random factors; with a spread their components differ by ``10**spread`` in opposite ways."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, cols, generator=generator, dtype=torch.float64)
    b = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.linspace(-spread, spread, rank, dtype=torch.float64)
    return LowRank(a * scale[:, None], b / scale)


def round_of(ranks: Sequence[int | None] = RANKS, spread: float = 0.0) -> list[LowRank | None]:
    return [None if r is None else factors_of(r, seed, spread) for seed, r in enumerate(ranks)]


def agreeing(ranks: Sequence[int | None]) -> list[LowRank | None]:
    """A round in which all have something in common; who left the tensor out is the odd one."""
    common, both = factors_of(3, 99), torch.tensor([4.0, 1.0], dtype=torch.float64)
    return [None if f is None else combine([common, f], both) for f in round_of(ranks)]


def explicit(factors: Sequence[LowRank | None]) -> Tensor:
    """The updates ``[n, rows * cols]`` themselves."""
    full = [torch.zeros(ROWS, COLS, dtype=torch.float64) if f is None else f.b @ f.a for f in factors]
    return torch.stack(full).reshape(len(full), -1)


def product(found: LowRank) -> Tensor:
    return (found.b @ found.a).reshape(-1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def pipeline_of(aggregator: str, *steps: str, **values: Any) -> Pipeline:
    return Pipeline.of(SoupRecipe(aggregator=aggregator, pre_aggregators=list(steps), **values))


@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("ranks", [RANKS, (1,), (None, 2), (16, 16, 16)], ids=str)
def test_inner_products_are_those_of_the_matrices(ranks: tuple[int | None, ...], spread: float) -> None:
    factors = round_of(ranks, spread)
    full = explicit(factors)
    found = products(factors)
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    scale = torch.outer(full.norm(dim=1), full.norm(dim=1))
    assert bool(((found - full @ full.T).abs() <= 1e-12 * scale).all())


def test_a_round_without_the_tensor_has_products_of_zero() -> None:
    assert torch.equal(products([None, None]), torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_any_combination_is_the_product_of_stacked_factors(spread: float) -> None:
    factors = round_of(spread=spread)
    coefficients = torch.tensor([0.5, -0.25, 3.0, 1e-3, 9.0, 0.0, 1.0], dtype=torch.float64)
    found = combine(factors, coefficients)
    assert found.rank == 1 + 4 + 16 + 30 + 1  # neither who left it out nor who counts for nothing
    wanted = coefficients @ explicit(factors)
    assert error(product(found), wanted) < 1e-13
    assert error(rows_of(found, 0, ROWS).double().reshape(-1), wanted) < 1e-7


@pytest.mark.few(31, "rules and steps are independent")
@pytest.mark.parametrize("steps", [(), ("nnm",), ("norm_cap",), ("arc", "nnm"), ("bucketing",)], ids=str)
@pytest.mark.parametrize(("name", "malicious"), WEIGHING)
def test_rules_that_weigh_updates_give_what_they_give_on_the_matrices(
    name: str, malicious: int, steps: tuple[str, ...]
) -> None:
    assert set(steps) <= set(PRE_AGGREGATORS.names())
    factors = agreeing((1, 4, 16, 30, None, 4, 1, 2, 3, 8, 5))
    weights = torch.ones(len(factors), dtype=torch.float64)
    pipeline = pipeline_of(name, *steps, num_malicious_nodes=malicious)
    pipeline.check(weights)
    plan = pipeline.plan(GramMatrix(products(factors), weights))
    wanted = pipeline.aggregate(explicit(factors).float(), weights.float()).double()
    found = combine(factors, plan.matrix[0])
    assert len(plan.matrix) == 1
    assert error(product(found), wanted) < 1e-6


def test_clipping_is_one_more_factor_of_every_coefficient() -> None:
    factors, most = round_of(), 5.0
    weights = torch.arange(1.0, len(factors) + 1, dtype=torch.float64)
    full = explicit(factors)
    norms = products(factors).diagonal().sqrt()
    clipping = CombinationWeights.scaled((most / norms.clamp_min(most)), weights)
    gram = GramMatrix(products(factors), weights).combined(clipping)
    plan = pipeline_of("weighted_mean", weighting="num_examples", num_examples_cap=9).plan(gram)
    clipped = full * (most / full.norm(dim=1).clamp_min(most))[:, None]
    wanted = (clipped * weights[:, None]).sum(dim=0) / weights.sum()
    assert bool((full.norm(dim=1) > most).any())
    assert error(product(combine(factors, plan.after(clipping).matrix[0])), wanted) < 1e-12


def test_the_rows_that_nearest_neighbours_make_go_on_to_a_rule_on_coordinates() -> None:
    factors = round_of((2, 4, 16, None, 4, 1, 3))
    weights = torch.ones(7, dtype=torch.float64)
    pipeline = pipeline_of("trimmed_mean", "nnm", num_malicious_nodes=2)
    plan = pipeline.plan(GramMatrix(products(factors), weights))
    rows = torch.stack([rows_of(combine(factors, row), 0, ROWS).reshape(-1) for row in plan.matrix])
    wanted = pipeline.aggregate(explicit(factors).float(), weights.float())
    assert len(rows) == 7
    assert error(pipeline.aggregator.combine(rows, plan.weights), wanted) < 1e-6


@pytest.mark.parametrize(("like", "least"), [(0.0, 0.9), (0.5, 0.3)])
def test_averaging_a_and_b_apart_misses_the_mean_by_far(like: float, least: float) -> None:
    """The mistake that stacked factors avoid; contributors that start from like factors make it smaller."""
    common = factors_of(4, 99)
    own = [factors_of(4, seed) for seed in range(5)]
    mixed = [LowRank(like * common.a + (1 - like) * f.a, like * common.b + (1 - like) * f.b) for f in own]
    wanted = explicit(mixed).mean(dim=0)
    apart = LowRank(torch.stack([f.a for f in mixed]).mean(0), torch.stack([f.b for f in mixed]).mean(0))
    stacked = combine(mixed, torch.full((5,), 0.2, dtype=torch.float64))
    assert error(product(stacked), wanted) < 1e-13
    assert error(product(apart), wanted) > least


@pytest.mark.parametrize("stored", ["bfloat16", "float32", "int8", "int4*3,int2*5"])
def test_payloads_of_every_kind_mean_what_they_decode_to(stored: str) -> None:
    shape = (ROWS, COLS)
    trained = factors_of(8, 0)
    encoded = LORA.encode_factors(trained.a, trained.b, -0.3, factors=stored)
    found = LowRank.of(encoded.payload, TensorRecord("w", shape, "lora", encoded.params))
    decoded = LORA.decode(encoded.payload, shape, encoded.params)
    assert (found.a.dtype, found.b.dtype) == (torch.float64, torch.float64)
    assert error(product(found), decoded.reshape(-1).double()) < 1e-7
    assert error(rows_of(found, 0, ROWS), decoded) < 1e-7
    assert products([found])[0, 0].sqrt().item() == pytest.approx(
        LORA.norm(encoded.payload, shape, encoded.params), rel=1e-12
    )


def test_a_scaling_that_overflows_beside_zeros_is_a_matrix_of_zeros() -> None:
    payload = {"a": torch.zeros(1, COLS).bfloat16(), "b": torch.full((ROWS, 1), 1e30).bfloat16()}
    params: Params = {"rank": 1, "scaling": 1e300}
    LORA.check(payload, (ROWS, COLS), params)
    found = LowRank.of(payload, TensorRecord("w", (ROWS, COLS), "lora", params))
    assert not bool(product(found).any())
    assert bool(torch.isfinite(products([found, factors_of(2, 0)])).all())


def test_exact_factors_stored_as_float32_are_the_combination_to_one_in_a_million() -> None:
    factors = [factors_of(2, seed) for seed in range(6)]
    coefficients = torch.linspace(-1, 1, 6, dtype=torch.float64)
    found = combine(factors, coefficients)
    encoded = LORA.encode_factors(found.a, found.b, factors="float32")
    decoded = LORA.decode(encoded.payload, (ROWS, COLS), encoded.params).double().reshape(-1)
    assert error(decoded, coefficients @ explicit(factors)) < 1e-6
    rounded = LORA.encode_factors(found.a, found.b)
    assert error(LORA.decode(rounded.payload, (ROWS, COLS), rounded.params).reshape(-1), decoded) > 1e-4


@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("rank", [1, 4, 19, 20, 50])
def test_an_adapter_of_a_rank_is_the_best_one_and_its_residual_the_rest(rank: int, spread: float) -> None:
    whole = combine(round_of(spread=spread), torch.ones(len(RANKS), dtype=torch.float64))
    matrix = product(whole).reshape(ROWS, COLS)
    values = torch.linalg.svdvals(matrix)
    found = refactor(whole, rank)
    assert found.kept.rank == min(rank, COLS)
    assert found.kept.rank + found.residual.rank == COLS
    assert error(product(found.kept) + product(found.residual), matrix.reshape(-1)) < 1e-12
    best = float(values[rank:].norm() / values.norm())
    assert found.relative_residual == pytest.approx(best, abs=1e-12)
    assert error(product(found.kept), matrix.reshape(-1)) == pytest.approx(best, abs=1e-12)
    torch.testing.assert_close(found.singular_values, values, rtol=1e-9, atol=1e-9)


def test_an_adapter_of_the_rank_the_soup_has_lacks_nothing() -> None:
    same = factors_of(3, 0)
    other = LowRank(-2 * same.a, -same.b)  # the same space, but not the same factors
    whole = combine([same, same, other], torch.ones(3, dtype=torch.float64))
    found = refactor(whole, 8)
    assert whole.rank == 9
    assert (found.kept.rank, found.residual.rank, found.relative_residual) == (3, 0, 0.0)
    assert error(product(found.kept), 4 * product(same)) < 1e-13


def test_zeros_stay_zeros() -> None:
    nothing = LowRank(torch.zeros(3, COLS).double(), torch.zeros(ROWS, 3).double())
    empty = combine([nothing, None], torch.tensor([0.0, 1.0]).double())
    assert empty.rank == 0
    for zero in (nothing, empty):
        found = refactor(zero, 2)
        assert (found.kept.rank, found.relative_residual) == (0, 0.0)
        assert not bool(rows_of(zero, 0, ROWS).any())
        assert not bool(products([zero, factors_of(2, 0)])[0].any())


def test_the_same_a_is_found_only_where_all_have_it() -> None:
    a = factors_of(4, 0).a
    same = [LowRank(a.clone(), factors_of(4, seed).b) for seed in range(3)]
    shared = frozen_a([*same, None])
    assert shared is not None
    assert torch.equal(shared, a)
    other = a.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(9.0).double())
    assert frozen_a([*same, LowRank(other, same[0].b)]) is None
    assert frozen_a([*same, LowRank(a[:2], same[0].b[:, :2])]) is None
    assert frozen_a([None, None]) is None


def test_a_combination_of_updates_with_one_a_keeps_it_and_their_rank() -> None:
    a = factors_of(4, 0).a
    same = [LowRank(a, factors_of(4, seed).b) for seed in range(3)]
    coefficients = torch.tensor([2.0, 0.0, -0.5, 1.0], dtype=torch.float64)
    found = combine([*same, None], coefficients)
    assert torch.equal(found.a, a)
    assert error(product(found), coefficients @ explicit([*same, None])) < 1e-14


def test_with_one_a_a_rule_on_the_coordinates_of_b_has_its_rank() -> None:
    """Whatever the rule decides on B is an adapter of the same rank; on full matrices it would not be."""
    a = factors_of(4, 0).a
    same = [LowRank(a, factors_of(4, seed).b) for seed in range(5)]
    merged = torch.stack([f.b for f in same]).median(dim=0).values
    assert torch.linalg.matrix_rank(merged @ a) == 4
    medians = explicit(same).median(dim=0).values.reshape(ROWS, COLS)
    assert torch.linalg.matrix_rank(medians) > 4


@given(cuts=st.lists(st.integers(1, ROWS - 1), max_size=5), threads=st.sampled_from([1, 2, 3]))
@settings(max_examples=30)
def test_rows_have_the_same_bits_in_any_block_on_any_threads(cuts: list[int], threads: int) -> None:
    whole = combine(round_of(spread=3.0), torch.linspace(-1, 2, len(RANKS), dtype=torch.float64))
    wanted = rows_of(whole, 0, ROWS)
    places = sorted({0, *cuts, ROWS})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        parts = [rows_of(whole, *pair) for pair in itertools.pairwise(places)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), wanted)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    ranks = (16, 3, 8, 16, 16, 16, 8, 16)
    factors = [factors_of(rank, seed, 1.0, rows=700, cols=1100) for seed, rank in enumerate(ranks)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            whole = combine(factors, torch.linspace(-1, 2, len(ranks), dtype=torch.float64))
            cut = refactor(whole, 16)
            assert torch.get_num_threads() == threads
            found.append([products(factors), rows_of(whole, 0, 700), cut.kept.a, cut.kept.b, cut.residual.a])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    factors = round_of((2, 3))
    with pytest.raises(GymError, match=r"2 updates but coefficients \[3\]"):
        combine(factors, torch.ones(3))
    with pytest.raises(GymError, match=r"shapes: \[\(24, 20\), \(24, 21\)\]"):
        products([*factors, factors_of(2, 0, cols=21)])
    with pytest.raises(GymError, match=r"different shapes: \[\]"):
        combine([None], torch.ones(1))
    with pytest.raises(GymError, match="rank 0") as refused:
        refactor(factors_of(2, 0), 0)
    assert refused.value.code is ErrorCode.USAGE
