"""The small operators of a decoder layer: native paths to the last bit, all of them and torch against float64."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels.decode import NormDeltas, NormWeight, Operators, operators
from torch import Tensor

PATHS = kernels.available()
NATIVE = [name for name in PATHS if name != "torch"]
WIDTHS = (1, 7, 8, 16, 17, 48, 576, 1001)
CLOSE = 2e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of a row, of the row's largest value."""
    rows = wanted.reshape(len(wanted), -1)
    return float(
        ((found.reshape(rows.shape) - rows).abs().amax(1) / rows.abs().amax(1).clamp_min(1e-30)).max()
    )


def float64_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return weight.double() * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


def deltas_for(rows: int, size: int) -> NormDeltas:
    return NormDeltas(
        normal(3, size, seed=5), torch.tensor([2, -1, 0, 1, -1, 2, 2, 0, 1])[:rows].contiguous()
    )


def all_of(ops: Operators, rows: int, size: int) -> list[Tensor]:
    """Every operator with and without what it may lack; a row's own width is ``size``."""
    found = []
    norm = NormWeight(normal(size, seed=1) + 1, 1e-5)
    deltas = deltas_for(rows, size)
    for term, theirs in ((None, None), (normal(rows, size, seed=2), deltas)):
        hidden, out = normal(rows, size, seed=3) * 3, torch.empty(rows, size)
        ops.add_norm(hidden, term, norm, theirs, out)
        found += [hidden, out]
    fused = normal(rows, 2 * size + 5, seed=4) * 4
    out = torch.empty(rows, size)
    ops.gate(fused[:, :size], fused[:, size : 2 * size], out)
    found.append(out)
    if size % 2 == 0:
        angles = normal(rows, size, seed=6)
        for norm_of_heads, theirs in ((None, None), (norm, None), (norm, deltas)):
            heads = normal(rows, 5, size, seed=7)
            ops.rotate(heads[:, 1:4], angles.cos(), angles.sin(), norm_of_heads, theirs)
            found.append(heads)
    return found


@pytest.mark.parametrize("size", WIDTHS)
def test_native_paths_and_any_number_of_threads_give_the_same_bits(size: int) -> None:
    wanted = all_of(operators("scalar"), 9, size) if "scalar" in PATHS else []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for path in NATIVE:
                for a, b in zip(all_of(operators(path), 9, size), wanted, strict=True):
                    assert torch.equal(a, b), (path, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", WIDTHS)
def test_a_norm_after_a_sum_is_that_of_float64(path: str, size: int) -> None:
    rows, weight = 9, normal(size, seed=1) + 1
    deltas = deltas_for(rows, size)
    hidden, term, out = normal(rows, size, seed=2), normal(rows, size, seed=3), torch.empty(rows, size)
    total = hidden + term
    operators(path).add_norm(hidden, term, NormWeight(weight, 1e-5), deltas, out)
    assert torch.equal(hidden, total)
    whole = weight.double() + torch.where(deltas.owner[:, None] >= 0, deltas.values[deltas.owner], 0.0)
    assert off(out, float64_norm(total, whole, 1e-5)) < CLOSE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dim", [2, 8, 12, 64, 80])
def test_heads_are_normalised_and_rotated_as_in_float64_and_others_stay(path: str, dim: int) -> None:
    angles = normal(4, dim, seed=1)  # of models the halves are the same
    weight, heads = normal(dim, seed=2) + 1, normal(4, 6, dim, seed=3)
    before = heads.clone()
    operators(path).rotate(heads[:, 2:5], angles.cos(), angles.sin(), NormWeight(weight, 1e-6))
    x = float64_norm(before[:, 2:5], weight, 1e-6)
    turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    wanted = x * angles.double().cos()[:, None] + turned * angles.double().sin()[:, None]
    assert off(heads[:, 2:5], wanted) < CLOSE
    assert torch.equal(heads[:, :2], before[:, :2])
    assert torch.equal(heads[:, 5:], before[:, 5:])


@pytest.mark.parametrize("path", PATHS)
def test_the_gate_is_that_of_float64_value_by_value(path: str) -> None:
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])[None]
    up = normal(1, gate.shape[1]) + 2
    out = torch.empty_like(gate)
    operators(path).gate(gate, up, out)
    wanted = (gate.double() * torch.sigmoid(gate.double())) * up.double()
    # Beyond exp's range silu is 0 to within 1e-36.
    assert bool(((out - wanted).abs() <= 1e-6 * wanted.abs() + 1e-35).all())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row(path: str, bad: float) -> None:
    ops, norm = operators(path), NormWeight(torch.ones(48), 1e-5)
    for column in (0, 21, 47):  # in whole vectors and behind them
        hidden, out = normal(3, 48), torch.empty(3, 48)
        hidden[1, column] = bad
        ops.add_norm(hidden, torch.zeros(3, 48), norm, None, out)
        assert torch.isfinite(out).all(1).tolist() == [True, False, True]
        heads = normal(3, 2, 48)
        heads[1, 0, column] = bad
        ops.rotate(heads, torch.ones(3, 48), torch.ones(3, 48))
        assert torch.isfinite(heads).all(2).tolist() == [[True, True], [False, True], [True, True]]
        gate, found = normal(3, 45), torch.empty(3, 45)
        gate[1, min(column, 44)] = bad
        ops.gate(gate, torch.ones(3, 45), found)
        assert torch.isfinite(found[[0, 2]]).all()
        assert not torch.isfinite(found[1]).all()


def test_a_norm_s_weight_in_another_number_format_is_refused() -> None:
    with pytest.raises(CodecError, match="bfloat16"):
        NormWeight(torch.ones(4, dtype=torch.bfloat16), 1e-5)
