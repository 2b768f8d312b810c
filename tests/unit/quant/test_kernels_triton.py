"""The same matmul on CUDA: agrees with the CPU where there is a GPU, and names what is missing where there is none."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import SignMatrix, triton_matmul

gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("triton")),
    reason="needs a CUDA device and Triton",
)


def variant(out: int, cols: int, group: int | None) -> SignMatrix:
    return SignMatrix(*kernels.encode_signs(torch.randn(out, cols), None, group), cols, group)


@gpu
@pytest.mark.parametrize(
    ("out", "cols", "group"), [(64, 64, None), (70, 100, 16), (300, 2056, 128), (10, 50, 3)]
)
def test_cuda_agrees_with_the_processor(out: int, cols: int, group: int | None) -> None:
    variants = [variant(out, cols, group) for _ in range(3)]
    x, y, index = torch.randn(5, cols), torch.randn(5, out), [0, 2, -1, 1, 0]
    expected = kernels.signed_matmul(x, variants, index, y.clone())
    found = kernels.signed_matmul(x.cuda(), variants, index, y.cuda()).cpu()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(CodecError, match="use exact"):
        kernels.signed_matmul(x.cuda(), variants, index, y.cuda(), "lookup")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
def test_without_triton_the_error_names_it() -> None:
    with pytest.raises(CodecError, match=r"need Triton.*install triton"):
        triton_matmul.signed_matmul_cuda(torch.ones(1, 8), [variant(4, 8, None)], [0], torch.zeros(1, 4))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_tensors_on_the_processor_are_not_for_triton() -> None:
    with pytest.raises(CodecError, match="not on one CUDA device"):
        triton_matmul.signed_matmul_cuda(torch.ones(1, 8), [variant(4, 8, None)], [0], torch.zeros(1, 4))
