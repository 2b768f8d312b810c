"""Weights that AWQ and GPTQ have packed, as plain weights: every layout that is read, and what is refused of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gym_fed.base.imports import awq, gptq
from gym_fed.core.errors import ErrorCode, GymError
from tests.support import packed_weights as packers

INPUTS, OUTPUTS = 96, 64
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def named(layer: dict[str, Any], name: str = "up") -> dict[str, Any]:
    return {f"{name}.{part}": value for part, value in layer.items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("layout", "less"), [(None, 1), ("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("group_size", [32, -1, 40])
def test_gptq_gives_what_was_packed(bits: int, layout: str | None, less: int, group_size: int) -> None:
    size = INPUTS if group_size == -1 else group_size
    values, zeros, scales = packers.drawn(INPUTS, OUTPUTS, bits, -(-INPUTS // size))
    tensors = named(packers.gptq(values, zeros, scales, bits, less=less))
    config = {**GPTQ, "bits": bits, "group_size": group_size, "checkpoint_format": layout}
    ((name, found),) = gptq.dequantised(tensors, config)
    assert name == "up.weight"
    assert torch.equal(found, packers.plain(values, zeros, scales, [i // size for i in range(INPUTS)]))


def test_gptq_takes_the_groups_of_sorted_inputs() -> None:
    values, zeros, scales = packers.drawn(INPUTS, OUTPUTS, 4, 3)
    group = torch.randint(0, 3, (INPUTS,), generator=torch.Generator().manual_seed(1))
    tensors = named({**packers.gptq(values, zeros, scales, 4), "g_idx": group.int()})
    ((_, found),) = gptq.dequantised(tensors, {**GPTQ, "desc_act": True})
    assert torch.equal(found, packers.plain(values, zeros, scales, group.tolist()))


def test_gptq_reads_other_bits_of_some_layers_by_their_shapes() -> None:
    tensors, wanted = {}, {}
    for name, bits, size in (("up", 4, 32), ("down", 8, 48), ("gate", 3, 32)):
        values, zeros, scales = packers.drawn(INPUTS, OUTPUTS, bits, INPUTS // size)
        tensors |= named(packers.gptq(values, zeros, scales, bits), name)
        wanted[f"{name}.weight"] = packers.plain(values, zeros, scales, [i // size for i in range(INPUTS)])
    found = dict(gptq.dequantised(tensors, {**GPTQ, "dynamic": {"+:down": {"bits": 8}}}))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [32, -1])
def test_awq_gives_what_was_packed_in_the_type_of_its_scales(dtype: torch.dtype, group_size: int) -> None:
    size = INPUTS if group_size == -1 else group_size
    values, zeros, scales = packers.drawn(INPUTS, OUTPUTS, 4, INPUTS // size, dtype=dtype)
    tensors = named(packers.awq(values, zeros, scales))
    ((_, found),) = awq.dequantised(tensors, {"w_bit": 4, "q_group_size": group_size, "version": "GEMM"})
    wanted = packers.plain(values, zeros, scales, [i // size for i in range(INPUTS)])
    assert found.dtype is dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 if dtype is torch.float32 else 0)


def test_plain_tensors_pass_as_they_are() -> None:
    layer = named(packers.awq(*packers.drawn(INPUTS, OUTPUTS, 4, 3)))
    beside = {
        "up.bias": torch.ones(OUTPUTS),
        "lm_head.weight": torch.ones(4, 2),
        "norm.weight": torch.ones(2),
    }
    found = dict(awq.dequantised({**layer, **beside}, {**AWQ, "modules_to_not_convert": ["lm_head"]}))
    assert set(found) == {"up.weight", *beside}
    assert all(found[name] is value for name, value in beside.items())


def layer_of(method: str) -> dict[str, Any]:
    drawn = packers.drawn(INPUTS, OUTPUTS, 4, 3)
    return packers.awq(*drawn) if method == "awq" else packers.gptq(*drawn, 4)


def read(method: str, tensors: dict[str, Any], **changes: Any) -> None:
    if method == "awq":
        list(awq.dequantised(tensors, {**AWQ, **changes}))
    else:
        list(gptq.dequantised(tensors, {**GPTQ, **changes}))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_model_without_packed_tensors_is_refused(method: str) -> None:
    with pytest.raises(GymError, match="qweight: there is none"):
        read(method, {"norm.weight": torch.ones(2)})


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("scales", torch.ones(3, 63, dtype=torch.float16), r"tensor up.scales: has shape \[3, 63\]"),
        ("scales", torch.ones(2, OUTPUTS), r"tensor up.(scales: has 2 groups|qzeros: has shape)"),
        ("scales", torch.ones(10**6, 1), r"tensor up.scales: has shape \[1000000, 1\]"),
        (
            "scales",
            torch.full((3, OUTPUTS), float("nan")),
            "tensor up.scales: has values that are not finite",
        ),
        ("scales", torch.ones(3, OUTPUTS, dtype=torch.int32), "tensor up.scales: is torch.int32"),
        ("qzeros", torch.ones(3, 5, dtype=torch.int32), r"tensor up.qzeros: has shape \[3, 5\]"),
        ("qzeros", torch.ones(3, 8), "tensor up.qzeros: is torch.float32"),
        ("qweight", torch.ones(0, OUTPUTS, dtype=torch.int32), "tensor up.qweight: has shape"),
        ("qweight", torch.ones(8, dtype=torch.int32), "tensor up.qweight: has shape"),
        ("qzeros", None, "tensor up.qzeros: is missing next to up.qweight"),
        ("qweight", None, "tensor up.(qzeros|scales): has no up.qweight next to it"),
        ("weight", torch.ones(2, 2), "tensor up.weight: exists next to up.qweight"),
        (
            "g_idx",
            torch.full((INPUTS,), 3, dtype=torch.int32),
            "tensor up.g_idx: refers to groups beyond the 3",
        ),
        (
            "g_idx",
            torch.full((INPUTS,), -1, dtype=torch.int32),
            "tensor up.g_idx: refers to groups beyond the 3",
        ),
        ("g_idx", torch.zeros(5, dtype=torch.int32), r"tensor up.g_idx: has shape \[5\]"),
        ("g_idx", torch.zeros(INPUTS), "tensor up.g_idx: is torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(method: str, part: str, value: Any, says: str) -> None:
    layer = {**layer_of(method), part: value}
    with pytest.raises(GymError, match=says) as caught:
        read(method, named({name: one for name, one in layer.items() if one is not None}))
    assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("awq", {"bits": 0}, "quantization_config.bits: 0, but 4 is required"),
        ("awq", {"bits": True}, "bits: True"),
        ("awq", {"version": "gemv"}, "version: 'gemv': only the AWQ layout gemm"),
        ("awq", {"group_size": 0}, "group_size: 0, but a size or -1 is required"),
        ("awq", {"group_size": 7}, "tensor up.scales: has 3 groups, but 96 inputs in groups of 7 need 14"),
        ("awq", {"group_size": 10**30}, "tensor up.scales: has 3 groups"),
        ("gptq", {"bits": 0}, "quantization_config.bits: 0, but 2, 3, 4 or 8 is required"),
        ("gptq", {"bits": 5}, "bits: 5"),
        ("gptq", {"bits": "4"}, "bits: '4'"),
        ("gptq", {"bits": 8}, "tensor up.qzeros: has shape"),
        ("gptq", {"bits": 3}, "up.qweight|up.qzeros"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ("gptq", {"group_size": None}, "group_size: None"),
    ],
)
def test_other_layouts_are_refused_by_the_key(method: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GymError, match=says) as caught:
        read(method, named(layer_of(method)), **changes)
    assert caught.value.code is ErrorCode.MODEL_INVALID
