"""The matmul in which every row has its own delta: exact to float32, lookup to 8 bits, the same on every path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import SignMatrix, native, signed_matmul
from torch import Tensor

WITHOUT_VBMI = "avx512 without vbmi"
PATHS = (*kernels.available(), *([WITHOUT_VBMI] if "avx512" in kernels.available() else []))
MODES = ["exact", "lookup", "lookup16"]
# (out, in, scales): tensor, row, or columns of a group; widths that fill no byte and heights that fill no tile.
LAYERS = [
    (64, 64, "tensor"),
    (70, 100, "row"),
    (172, 64, "tensor"),
    (100, 4096, 128),
    (65, 2056, 16),
    (10, 300, 128),
    (130, 5003, "row"),
    (4, 5, 8),
    (64, 1536, 32),
    (70, 1100, 24),
    (33, 1030, 1024),
    (64, 3000, 1536),
]
INDEX = [0, 2, 1, -1, 1, 1, 0]


@contextmanager
def computing(path: str) -> Iterator[None]:
    """By a path, or as a processor whose AVX-512 lacks VBMI."""
    hidden = native.HAS_VBMI if path == WITHOUT_VBMI else 0
    with kernels.using("avx512" if hidden else path), native.without(hidden):
        yield


def variants_of(out: int, cols: int, scales: str | int, seed: int = 0) -> list[SignMatrix]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(3):
        delta = torch.randn(out, cols, generator=generator) * torch.rand(out, 1, generator=generator)
        group = {"tensor": None, "row": cols}.get(scales, scales)
        bits, values = kernels.encode_signs(delta, None, group)
        found.append(SignMatrix(bits, values, cols, None if isinstance(scales, str) else scales))
    return found


def dense(matrix: SignMatrix) -> Tensor:
    group = matrix.cols if matrix.scales.ndim == 2 and matrix.group_size is None else matrix.group_size
    return kernels.decode_signs(matrix.bits, matrix.scales, matrix.cols, group).double()


def truth(x: Tensor, variants: list[SignMatrix], index: list[int]) -> Tensor:
    """The delta's term in float64."""
    nothing = torch.zeros(variants[0].rows, dtype=torch.float64)
    return torch.stack(
        [dense(variants[v]) @ row.double() if v >= 0 else nothing for row, v in zip(x, index, strict=True)]
    )


@pytest.mark.few(61, "paths, modes and layers are independent")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("out", "cols", "scales"), LAYERS)
def test_every_row_gets_the_term_of_its_own_variant(
    path: str, mode: str, out: int, cols: int, scales: str | int
) -> None:
    variants = variants_of(out, cols, scales)
    x, before = torch.randn(7, cols), torch.randn(7, out)
    y = before.clone()
    with computing(path):
        assert signed_matmul(x, variants, INDEX, y, mode) is y
    expected = truth(x, variants, INDEX)
    error = (y - before).double() - expected
    assert torch.equal(y[3], before[3]), "index -1 is the plain base"
    if mode == "exact":
        assert float(error.abs().max() / expected.abs().max()) < 2e-6
    else:
        assert float(error.norm() / expected.norm()) < {"lookup": 0.02, "lookup16": 1e-4}[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("out", "cols", "scales"), LAYERS)
def test_paths_agree_to_the_last_bit(mode: str, out: int, cols: int, scales: str | int) -> None:
    variants, x, before = variants_of(out, cols, scales, 1), torch.randn(7, cols), torch.randn(7, out)
    found = {}
    for path in PATHS:
        with computing(path):
            found[path] = signed_matmul(x, variants, INDEX, before.clone(), mode)
    if mode == "exact":
        del found["torch"]  # adds in another order: held to float64 above
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(found.values()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_alone_in_any_batch_and_with_any_threads(path: str, mode: str) -> None:
    variants, x = variants_of(200, 640, 64, 2), torch.randn(7, 640)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with computing(path):
                found.append(signed_matmul(x, variants, torch.tensor(INDEX), torch.zeros(7, 200), mode))
                alone = signed_matmul(x[1:2], variants, [2], torch.zeros(1, 200), mode)[0]
    finally:
        torch.set_num_threads(threads)
    if path == "torch" and mode == "exact":
        assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-4)
        assert torch.allclose(found[0][1], alone, rtol=1e-5, atol=1e-4)
    else:
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0][1], alone)


@pytest.mark.parametrize("path", PATHS)
def test_outlying_activations_cost_look_up_only_their_own_block(path: str) -> None:
    (matrix, *_) = variants_of(64, 2048, "tensor", 3)
    x = torch.randn(1, 2048)
    loud = x.clone()
    loud[0, 0] = 300.0
    with computing(path):
        quiet_error = signed_matmul(x, [matrix], [0], torch.zeros(1, 64), "lookup") - truth(x, [matrix], [0])
        found = signed_matmul(loud, [matrix], [0], torch.zeros(1, 64), "lookup")
        exact = signed_matmul(loud, [matrix], [0], torch.zeros(1, 64), "exact")
    scale = float(matrix.scales[0])
    largest_sum = float(loud.reshape(-1, 4).abs().sum(dim=1).max())
    bound = scale * (256 * largest_sum / 254 + 256 * 20 / 254)  # half a step for each of 512 sums of four
    assert float((found - exact).abs().max()) <= bound
    assert float(quiet_error.abs().max()) < float((found - exact).abs().max())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["lookup", "lookup16"])
@pytest.mark.parametrize("size", [1e-40, 1e-31, 1e30])
def test_look_up_takes_activations_of_any_size(path: str, mode: str, size: float) -> None:
    (matrix, *_) = variants_of(64, 1100, "tensor", 8)
    x = torch.ones(1, 1100) * size
    with computing(path):
        found = signed_matmul(x, [matrix], [0], torch.zeros(1, 64), mode).double()
    expected = truth(x, [matrix], [0])
    assert torch.isfinite(found).all()
    if size < 1e-30:
        assert not found.any(), "a block whose sums are below 1e-30 counts as zero"
    else:
        assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("path", PATHS)
def test_groups_that_begin_within_a_byte_are_exact_and_refused_by_look_up(path: str) -> None:
    variants, x = variants_of(20, 50, 3, 4), torch.randn(7, 50)
    with computing(path):
        y = signed_matmul(x, variants, INDEX, torch.zeros(7, 20))
        assert torch.allclose(y.double(), truth(x, variants, INDEX), atol=1e-4)
        with pytest.raises(CodecError, match="not a multiple of 8"):
            signed_matmul(x, variants, INDEX, y, "lookup")
        with pytest.raises(CodecError, match="not a multiple of 8"):
            signed_matmul(x, variants, INDEX, y, "lookup16")


@pytest.mark.parametrize("path", PATHS)
def test_look_up_refuses_activations_that_are_not_finite_and_leaves_y_alone(path: str) -> None:
    variants, x, y = variants_of(20, 50, "tensor", 5), torch.randn(2, 50), torch.zeros(2, 20)
    x[1, 49] = float("nan")
    with computing(path):
        with pytest.raises(CodecError, match="activation is not finite"):
            signed_matmul(x, variants, [0, 1], y, "lookup")
        assert torch.equal(y, torch.zeros(2, 20))
        assert signed_matmul(x, variants, [0, 1], y, "exact")[1].isnan().all()


def test_zeros_and_an_empty_batch_are_no_special_case() -> None:
    variants = variants_of(20, 50, "tensor", 6)
    for path, mode in itertools.product(PATHS, MODES):
        with computing(path):
            y = signed_matmul(torch.zeros(2, 50), variants, [0, 1], torch.ones(2, 20), mode)
            assert torch.equal(y, torch.ones(2, 20))
            assert signed_matmul(torch.zeros(0, 50), variants, [], torch.ones(0, 20), mode).shape == (0, 20)
            assert torch.equal(signed_matmul(torch.ones(1, 50), [], [-1], torch.ones(1, 20), mode), y[:1])


def test_what_does_not_fit_is_refused_by_name() -> None:
    variants = variants_of(20, 50, "tensor", 7)
    x, y = torch.zeros(2, 50), torch.zeros(2, 20)
    with pytest.raises(CodecError, match=r"index\[1\] is 3"):
        signed_matmul(x, variants, [0, 3], y)
    with pytest.raises(CodecError, match="batches differ"):
        signed_matmul(x, variants, [0], y)
    with pytest.raises(CodecError, match="variant 0 is"):
        signed_matmul(torch.zeros(2, 49), variants, [0, 1], y)
    with pytest.raises(CodecError, match="mode is 'fast'"):
        signed_matmul(x, variants, [0, 1], y, "fast")
    with pytest.raises(CodecError, match="y is"):
        signed_matmul(x, variants, [0, 1], y.double())
    with pytest.raises(CodecError, match="scales are"):
        SignMatrix(variants[0].bits, torch.ones(20, 2), 50)
    with pytest.raises(CodecError, match="does not match 90 columns"):
        SignMatrix(variants[0].bits, torch.ones(1), 90)
