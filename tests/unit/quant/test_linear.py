"""Products with packed base weights: every path, any number of rows, and numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import native
from gym_quant.kernels.linear import last_linear_kernel
from gym_quant.linear import PackedLinear, get_linear, linear_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

FEATURES = native.features() or 0
FORMATS = ("bfloat16", "int4", "int8")
CODES = ("int4", "int8")
# (out, in): widths and heights that fill no tile, pair or group, and some that do.
SHAPES = [(1, 1), (5, 7), (33, 64), (64, 172), (40, 260), (192, 576), (32, 2056)]
MANY = {"bfloat16": 1, "int8": 64, "int4": 32}
"""Rows from which on products are in bfloat16, if the processor has them."""
KERNELS = {"avx512": "avx512", "avx512 plain": "avx512", "avx2": "avx2"}
LIMIT = {"bfloat16": 1e-6, "int8": 2e-5, "int4": 2e-5}
"""Error over the sum of |activation| * |largest weight of its group|."""


@contextmanager
def computing_by(name: str) -> Iterator[None]:
    """A path, or ``avx512 plain``: without VNNI and bfloat16 products."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "avx512 plain":
            patch.setattr(native, "features", lambda: FEATURES & ~(native.HAS_VNNI | native.HAS_BF16))
        with kernels.using(name.split(" ", maxsplit=1)[0]):
            yield


def paths() -> list[str]:
    plain = ["avx512 plain"] if FEATURES & (native.HAS_VNNI | native.HAS_BF16) else []
    return [*kernels.available(), *plain]


def numbers(n: int, out: int, cols: int) -> tuple[Tensor, Tensor]:
    """Activations of columns of unequal size, and weights."""
    made = torch.Generator().manual_seed(out * cols + n)
    x = torch.randn(n, cols, generator=made) * torch.exp(torch.randn(cols, generator=made))
    return x, torch.randn(out, cols, generator=made)


def product(packed: PackedLinear, x: Tensor) -> Tensor:
    y = torch.full((len(x), packed.rows), torch.nan)
    packed.multiply(x, y)
    return y


def bound(x: Tensor, weight: Tensor, group: int) -> Tensor:
    """[n, out]: for every group the largest activation times the weights' sizes, at least the sum of |x| |w|."""
    sizes = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    spread = sizes.amax(-1).repeat_interleave(group, 1)[:, : x.shape[1]]
    return spread.double() @ weight.double().abs().T


def rounds(path: str) -> bool:
    """True if the path has products of bfloat16."""
    return path == "avx512" and bool(FEATURES & native.HAS_BF16)


def assert_near(y: Tensor, x: Tensor, dense: Tensor, format: str, rounded: bool) -> None:
    """With ``rounded``, of activations and weights that are rounded to bfloat16."""
    a, b = (x.bfloat16().double(), dense.bfloat16().double()) if rounded else (x.double(), dense.double())
    limit = 2e-6 if rounded else LIMIT[format]
    assert bool(((y - a @ b.T).abs() <= limit * bound(a.float(), b.float(), 32) + 1e-30).all())


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "cols"), SHAPES)
def test_products_are_those_of_the_decoded_weights(path: str, format: str, out: int, cols: int) -> None:
    packed = get_linear(format).pack(numbers(1, out, cols)[1])
    dense = packed.decode_block(0, out)
    for n in (1, 2, 3, 4, 7, 13):
        x, _ = numbers(n, out, cols)
        with computing_by(path):
            y = product(packed, x)
        assert_near(y, x, dense, format, rounded=format == "bfloat16" and rounds(path))


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("group", [8, 16, 32, 64, 256])
@pytest.mark.parametrize(("out", "cols"), SHAPES)
def test_paths_agree_to_the_last_bit_where_weights_are_codes(
    format: str, group: int, out: int, cols: int
) -> None:
    packed = get_linear(format).pack(numbers(1, out, cols)[1], group)
    for n in (1, 2, 3, 9):
        x, _ = numbers(n, out, cols)
        found = {}
        for path in paths():
            with computing_by(path):
                found[path] = product(packed, x)
        assert {p: torch.equal(y, found["torch"]) for p, y in found.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize("path", [path for path in paths() if path != "torch"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_alone_in_a_batch_and_with_any_threads(path: str, format: str) -> None:
    rows = 100 if format == "bfloat16" and rounds(path) else 16
    packed, (x, _) = get_linear(format).pack(numbers(1, 200, 640)[1]), numbers(rows, 200, 640)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with computing_by(path):
                found.append(product(packed, x))
                alone = torch.cat([product(packed, row[None]) for row in x])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], alone)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [16, 17, 31, 32, 63, 64, 95, 96, 600])
def test_many_rows_are_near_the_decoded_weights(path: str, format: str, n: int) -> None:
    packed, (x, _) = get_linear(format).pack(numbers(1, 70, 100)[1]), numbers(n, 70, 100)
    dense = packed.decode_block(0, 70)
    many = n >= MANY[format] and rounds(path)
    with computing_by(path):
        product(packed, x[:1])
        y = product(packed, x)
    if path != "torch":
        wanted = "scalar" if path == "scalar" else "avx512 bfloat16" if many else KERNELS[path]
        assert last_linear_kernel() in (wanted, f"{wanted} vnni")
    assert_near(y, x, dense, format, many)


@pytest.mark.parametrize("path", [path for path in paths() if path != "torch"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("cols", "n"), [(20_000, 11), (4_100, 600)])
def test_more_rows_than_the_work_space_holds_are_those_of_each_part(
    path: str, format: str, cols: int, n: int
) -> None:
    packed, (x, _) = get_linear(format).pack(numbers(1, 33, cols)[1]), numbers(n, 33, cols)
    with computing_by(path):
        y = product(packed, x)
        parts = torch.cat([product(packed, part) for part in x.split(2 if n < 100 else 300)])
    if path == "scalar" and n > 100:  # torch's own product, which may add in another order
        assert torch.allclose(y, parts, rtol=1e-5, atol=1e-3)
    else:
        assert torch.equal(y, parts)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [5, 120])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_activation_that_is_not_finite_spoils_its_row_alone(
    path: str, format: str, n: int, bad: float
) -> None:
    packed, (x, _) = get_linear(format).pack(numbers(1, 40, 100)[1]), numbers(n, 40, 100)
    with computing_by(path):
        clean = product(packed, x)
        x[3, 70] = bad
        y = product(packed, x)
    others = [row for row in range(n) if row != 3]
    assert not bool(y[3].isfinite().any())
    assert torch.equal(y[others], clean[others])
    if format in CODES and n == 5:
        assert bool(y[3].isnan().all())


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-31, 1e30, 3e38])
def test_activations_of_extreme_sizes_stay_finite(path: str, format: str, size: float) -> None:
    packed = get_linear(format).pack(numbers(1, 40, 100)[1] / 1000)
    x = numbers(3, 40, 100)[0].clamp(-1, 1) * size
    with computing_by("torch"):
        wanted = product(packed, x)
    with computing_by(path):
        y = product(packed, x)
    assert torch.equal(y, wanted)
    assert bool(y.isfinite().all())


@settings(max_examples=60)
@given(
    out=st.integers(1, 80),
    cols=st.integers(1, 150),
    n=st.integers(1, 40),
    group=st.sampled_from([8, 16, 24, 32, 48, 256]),
    seed=st.integers(0, 2**31),
)
def test_products_of_any_shape_are_those_of_the_reference(
    out: int, cols: int, n: int, group: int, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(out, cols, generator=made), torch.randn(n, cols, generator=made)
    for format in CODES:
        packed = get_linear(format).pack(weight, group)
        with computing_by("torch"):
            wanted = product(packed, x)
        if n < type(packed).many_rows:  # type: ignore[attr-defined]
            assert torch.equal(product(packed, x), wanted)


def test_what_does_not_fit_is_refused_by_name() -> None:
    packed = get_linear("int8").pack(torch.ones(20, 50))
    x, y = torch.zeros(2, 50), torch.zeros(2, 20)
    with pytest.raises(CodecError, match=r"x is \[2, 49\], not \[2, 50\] for weights \[20, 50\]"):
        packed.multiply(torch.zeros(2, 49), y)
    with pytest.raises(CodecError, match=r"y is \[3, 20\], not \[2, 20\]"):
        packed.multiply(x, torch.zeros(3, 20))
    with pytest.raises(CodecError, match=r"y is contiguous torch\.float64"):
        packed.multiply(x, y.double())
    with pytest.raises(CodecError, match=r"x is strided torch\.float32"):
        packed.multiply(torch.zeros(50, 2).T, y)
    with pytest.raises(CodecError, match="rows from 3 to 21 are not within 0 to 20"):
        packed.decode_block(3, 21)
    packed.multiply(x[:0], y[:0])


def test_the_formats_are_members_of_the_registry() -> None:
    assert linear_formats() == FORMATS
    assert [get_linear(name).format for name in FORMATS] == list(FORMATS)
    with pytest.raises(CodecError, match=r"unknown linear format 'int3' \(known: bfloat16, int4, int8\)"):
        get_linear("int3")
