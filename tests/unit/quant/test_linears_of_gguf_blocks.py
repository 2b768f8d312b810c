"""Blocks of GGUF in the base's packed formats: 8 bits in groups of 32 are the same numbers in both."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gym_quant.linear import get_linear


def dequantised(kind: Kind, scale: float = 0.05) -> np.ndarray:
    """Random weights of 96 x 320 as a GGUF file has them, by gguf's own code: an empty and a small block too."""
    weights = (np.random.default_rng(0).standard_normal((96, 320)) * scale).astype(np.float32)
    weights[0, :32] = 0
    weights[5, 32:64] *= 1e-2
    return gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0, 30.0])
def test_the_values_of_q8_0_blocks_are_exactly_those_of_int8(scale: float) -> None:
    values = dequantised(Kind.Q8_0, scale)
    packed = get_linear("int8").pack(torch.from_numpy(values))
    assert np.array_equal(packed.decode_block(0, 96).numpy(), values)


def test_after_their_import_as_float16_they_are_within_its_rounding_and_a_scales() -> None:
    values = dequantised(Kind.Q8_0)
    packed = get_linear("int8").pack(torch.from_numpy(values).half())
    error = np.abs(packed.decode_block(0, 96).numpy() - values)
    assert (error <= 2.0**-10 * np.abs(values) + 1e-7).all()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_blocks_of_4_bits_are_within_a_step_of_int4(kind: Kind) -> None:
    """Scale and minimum are fitted anew, so codes of a block without its largest value may move."""
    values = dequantised(kind)
    packed = get_linear("int4").pack(torch.from_numpy(values))
    blocks = values.reshape(-1, 32)
    step = (blocks.max(1) - blocks.min(1)) / 15
    error = np.abs(packed.decode_block(0, 96).numpy() - values).reshape(-1, 32)
    assert (error.max(1) <= step + 1e-7).all()
