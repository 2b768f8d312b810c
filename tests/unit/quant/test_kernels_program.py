"""A program's calls are the operators' own, whatever kinds of numbers a config has."""

from __future__ import annotations

import pytest
import torch
from gym_quant.kernels import dispatch
from gym_quant.kernels.decode import NormDeltas, NormWeight, operators
from gym_quant.kernels.program import Program

pytestmark = pytest.mark.skipif(dispatch.path() == "torch", reason="a program is of native calls")


@pytest.mark.parametrize("path", [path for path in dispatch.available() if path != "torch"])
@pytest.mark.parametrize("eps", [1e-6, 1])
def test_norm_rotation_and_gate_have_the_same_bits(path: str, eps: float) -> None:
    torch.manual_seed(0)
    rows, heads, dim = 3, 5, 14
    size = heads * dim
    norm, deltas = NormWeight(torch.randn(size), eps), torch.randn(2, size)
    head_norm, head_deltas = NormWeight(torch.randn(dim), eps), torch.randn(2, dim)
    owners = torch.tensor([1, -1, 0])
    cosine, sine = torch.randn(rows, dim), torch.randn(rows, dim)
    inputs = {
        "hidden": torch.randn(rows, size),
        "term": torch.randn(rows, size),
        "gates": torch.randn(rows, 2 * size),
    }
    found = []
    for recorded in (True, False):
        hidden, term, gates = (tensor.clone() for tensor in inputs.values())
        normed, gated = torch.empty(rows, size), torch.empty(rows, size)
        split = normed.view(rows, heads, dim)
        if recorded:
            program = Program(path)
            program.add_norm(hidden, term, norm, deltas, normed)
            program.rotate(split, head_norm, head_deltas)
            program.gate(gates[:, :size], gates[:, size:], gated)
            angles = {"cosine": cosine.data_ptr(), "sine": sine.data_ptr()}
            program.run(owners=owners.data_ptr(), **angles)
        else:
            ops = operators(path)
            ops.add_norm(hidden, term, norm, NormDeltas(deltas, owners), normed)
            ops.rotate(split, cosine, sine, head_norm, NormDeltas(head_deltas, owners))
            ops.gate(gates[:, :size], gates[:, size:], gated)
        found.append(torch.cat([hidden, normed, gated]))
    assert torch.equal(*found)


@pytest.mark.parametrize("path", [path for path in dispatch.available() if path != "torch"])
def test_a_bias_is_that_of_a_row_s_own_variant(path: str) -> None:
    y, biases, plain = torch.zeros(4, 6), torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]), torch.ones(3)
    program = Program(path)
    program.add_bias(plain, y[:, :3])
    program.add_bias(biases, y[:, 3:])
    owners = torch.tensor([0, -1, 1, 0])
    program.run(owners=owners.data_ptr())
    assert y[:, :3].eq(1).all()
    assert y[:, 3:].tolist() == [[1, 2, 3], [0, 0, 0], [10, 20, 30], [1, 2, 3]]
