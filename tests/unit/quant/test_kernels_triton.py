"""The same matmul in Triton: agrees with the CPU's on a GPU and in Triton's interpreter, and names what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import SignMatrix

gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("triton")),
    reason="needs a CUDA device and Triton",
)


def variant(out: int, cols: int, group: int | None) -> SignMatrix:
    return SignMatrix(*kernels.encode_signs(torch.randn(out, cols), None, group), cols, group)


SHAPES = [(64, 64, None), (70, 100, 16), (130, 520, 128), (10, 50, 3)]
"""Outputs, inputs and group: whole blocks, odd ones, several blocks of bytes, groups that are no bytes."""


@gpu
@pytest.mark.parametrize(("out", "cols", "group"), [*SHAPES, (300, 2056, 128)])
def test_cuda_agrees_with_the_processor(out: int, cols: int, group: int | None) -> None:
    variants = [variant(out, cols, group) for _ in range(3)]
    x, y, index = torch.randn(5, cols), torch.randn(5, out), [0, 2, -1, 1, 0]
    expected = kernels.signed_matmul(x, variants, index, y.clone())
    found = kernels.signed_matmul(x.cuda(), variants, index, y.cuda()).cpu()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(CodecError, match="use exact"):
        kernels.signed_matmul(x.cuda(), variants, index, y.cuda(), "lookup")


APART = Path(sys.prefix) / "triton"
"""Where `make triton` puts it. Beside everything else it would print leaks of its own at the end of every process."""
INTERPRETED = """
import json, sys, torch
from gym_quant import kernels
from gym_quant.kernels import SignMatrix, triton_matmul

apart = []
for out, cols, group in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    encoded = [kernels.encode_signs(torch.randn(out, cols), None, group) for _ in range(3)]
    variants = [SignMatrix(*one, cols, group) for one in encoded]
    x, y, index = torch.randn(5, cols), torch.randn(5, out), [0, 2, -1, 1, 0]
    expected = kernels.signed_matmul(x, variants, index, y.clone())
    found = triton_matmul.signed_matmul_cuda(x, variants, index, y.clone())
    apart.append([float((found - expected).abs().max()), float((found - y)[2].abs().max())])
print(json.dumps(apart))
"""
"""A process of its own: Triton reads the variable when it is imported."""


@pytest.mark.skipif(
    not (importlib.util.find_spec("triton") or APART.is_dir()), reason="Triton is not here: make triton"
)
def test_tritons_interpreter_agrees_with_the_processor() -> None:
    path = os.pathsep.join([*sys.path, str(APART)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(SHAPES)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout.splitlines()[-1])
    assert len(apart) == len(SHAPES)
    for (off, untouched), (_, cols, _) in zip(apart, SHAPES, strict=True):
        assert off < 4e-5 * max(1, cols / 2056)
        assert untouched == 0.0  # the row without a variant


def module_with(monkeypatch: pytest.MonkeyPatch, triton: Any, language: Any) -> Any:
    """The module as it is imported beside such a Triton; the real one prints leaks of its own at a process's end."""
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "gym_quant.kernels.triton_matmul", raising=False)
    return importlib.import_module("gym_quant.kernels.triton_matmul")


def test_without_triton_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_with(monkeypatch, None, None)
    with pytest.raises(CodecError, match=r"need Triton.*install triton"):
        module.signed_matmul_cuda(torch.ones(1, 8), [variant(4, 8, None)], [0], torch.zeros(1, 4))


def test_tensors_on_the_processor_are_not_for_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(interpret=False)
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    module = module_with(monkeypatch, triton, SimpleNamespace(constexpr=None))
    with pytest.raises(CodecError, match="not on one CUDA device"):
        module.signed_matmul_cuda(torch.ones(1, 8), [variant(4, 8, None)], [0], torch.zeros(1, 4))


SLOTTED = """
import json, sys, torch
from gym_quant import kernels
from gym_quant.kernels.triton_slots import add_signed_reference, add_signed_slots

apart = []
for out, cols, rows in json.loads(sys.argv[1]):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        encoded = [kernels.encode_signs(torch.randn(out, cols), None, None) for _ in range(4)]
        bits = torch.stack([bits for bits, _ in encoded])
        scales = torch.stack([scale.expand(out) for _, scale in encoded]).contiguous()
        slots = torch.tensor([-1, 0, 3, 3, 1] * 4, dtype=torch.int32)[: rows + 2]
        x, y = torch.randn(rows, cols).to(dtype), torch.randn(rows, out + 3)[:, 1:-2]
        expected = y.clone()
        add_signed_reference(x, bits, scales, slots, expected)
        found = y.clone()
        add_signed_slots(x, bits, scales, slots, found)
        apart.append([float((found - expected).abs().max()), float((found - y)[slots[:rows] < 0].abs().max())])
print(json.dumps(apart))
"""
SLOTTED_SHAPES = [(64, 64, 3), (70, 100, 5), (130, 520, 18)]
"""Outputs, inputs and rows: whole blocks, odd ones, more rows than a block has."""


@pytest.mark.skipif(
    not (importlib.util.find_spec("triton") or APART.is_dir()), reason="Triton is not here: make triton"
)
def test_kernel_of_slots_agrees_with_the_reference_in_tritons_interpreter() -> None:
    path = os.pathsep.join([*sys.path, str(APART)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SLOTTED, json.dumps(SLOTTED_SHAPES)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout.splitlines()[-1])
    assert len(apart) == 2 * len(SLOTTED_SHAPES)
    for off, untouched in apart:
        assert off < 1e-4
        assert untouched == 0.0  # rows with slot -1
