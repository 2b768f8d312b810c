"""Packing base weights: the same bytes on every path, errors within their bounds, refusals by name."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.linear import get_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CODES = ("int4", "int8")
SHAPES = [(1, 1), (5, 7), (33, 64), (40, 172), (70, 260)]


def bytes_of(format: str, weight: Tensor, group: int | None = None) -> dict[str, Tensor]:
    """The tiles that each path makes."""
    found = {}
    for path in kernels.available():
        with kernels.using(path):
            found[path] = get_linear(format).pack(weight, group).tensors()["tiles"].view(torch.uint8)
    return found


@pytest.mark.parametrize("format", ["bfloat16", *CODES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "cols"), SHAPES)
def test_every_path_packs_the_same_bytes_and_decodes_the_same_values(
    format: str, dtype: torch.dtype, out: int, cols: int
) -> None:
    weight = (torch.randn(out, cols, generator=torch.Generator().manual_seed(out + cols)) / 30).to(dtype)
    found = bytes_of(format, weight)
    assert all(torch.equal(tiles, found["torch"]) for tiles in found.values())
    packed, decoded = get_linear(format).pack(weight), {}
    for path in kernels.available():
        with kernels.using(path):
            decoded[path] = packed.decode_block(0, out)
            assert torch.equal(
                packed.decode_block(out // 3, out - out // 4), decoded[path][out // 3 : out - out // 4]
            )
    assert all(torch.equal(values, decoded["torch"]) for values in decoded.values())
    if format == "bfloat16":
        assert torch.equal(decoded["torch"], weight.bfloat16().float())


@settings(max_examples=60)
@given(
    out=st.integers(1, 40),
    cols=st.integers(1, 80),
    group=st.sampled_from([8, 16, 32, 256]),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "equal", "zeros", "whole", "outlier", "positive", "tiny", "huge"]),
)
def test_paths_pack_the_same_bytes_whatever_the_weights(
    out: int, cols: int, group: int, seed: int, kind: str
) -> None:
    weight = torch.randn(out, cols, generator=torch.Generator().manual_seed(seed))
    weight = {
        "normal": weight,
        "equal": torch.full_like(weight, 0.3),
        "zeros": weight * (weight > 1),
        "whole": weight.round(),
        "outlier": weight * torch.where(weight.abs() > 2, 1000.0, 1.0),
        "positive": weight.abs() + 5,
        "tiny": weight * 1e-36,
        "huge": weight * 5e37,
    }[kind]
    for format in CODES:
        found = bytes_of(format, weight, group)
        assert all(torch.equal(tiles, found["torch"]) for tiles in found.values())


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
@pytest.mark.parametrize(("format", "levels"), [("int8", 254), ("int4", 15)])
def test_squared_errors_are_at_most_those_of_a_grid_that_covers_the_group(
    format: str, levels: int, group: int, shift: float
) -> None:
    weight = torch.randn(40, 172, generator=torch.Generator().manual_seed(group)) * 3 + shift
    error = get_linear(format).pack(weight, group).decode_block(0, 40) - weight
    padded = torch.nn.functional.pad(weight, (0, -172 % group), value=shift).view(40, -1, group)
    low, high = padded.amin(-1), padded.amax(-1)
    reach = 2 * torch.maximum(-low, high) if format == "int8" else high - low
    half_step = reach / levels / 2 + 8e-4 * torch.maximum(-low, high) * (format == "int4")
    lost = torch.nn.functional.pad(error, (0, -172 % group)).view(40, -1, group).square().sum(-1)
    assert bool((lost <= 1.002 * group * half_step.square()).all())


def test_weights_on_a_grid_of_int8_come_back_as_they_were() -> None:
    codes = torch.randint(-127, 128, (40, 4, 32), generator=torch.Generator().manual_seed(0)).float()
    codes[..., 0] = 127
    scales = (torch.rand(40, 4, 1, generator=torch.Generator().manual_seed(1)) / 50).half().float()
    weight = (codes * scales).view(40, 128)
    assert torch.equal(get_linear("int8").pack(weight).decode_block(0, 40), weight)


def test_small_weights_beside_large_ones_keep_their_precision() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[:32] *= 1e-3
    back = get_linear("int8").pack(weight).decode_block(0, 32)
    assert float((back - weight[:32]).norm() / weight[:32].norm()) < 6e-3


@pytest.mark.parametrize("format", ["bfloat16", *CODES])
@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(3), r"weights are \[3\], not \[out, in\]"),
        (torch.ones(0, 3), r"weights are \[0, 3\]"),
        (torch.ones(3, 3, dtype=torch.int64), "weights are torch.int64"),
        (torch.tensor([[1.0, torch.nan]]), "not finite"),
        (torch.tensor([[1.0, -torch.inf]]), "not finite"),
        (torch.tensor([[3.4e38]]), r"above 3\.3e38"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(format: str, weight: Tensor, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        get_linear(format).pack(weight)


@pytest.mark.parametrize("group", [0, 4, 12, 264, -8])
def test_a_group_size_that_the_layout_lacks_is_refused(group: int) -> None:
    with pytest.raises(CodecError, match=f"group_size is {group}, not a multiple of 8"):
        get_linear("int8").pack(torch.ones(2, 2), group)
    with pytest.raises(CodecError, match="bfloat16 has no scales"):
        get_linear("bfloat16").pack(torch.ones(2, 2), group)
