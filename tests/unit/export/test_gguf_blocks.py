"""GGUF's block types and mixtures: read back by the ``gguf`` package, with llama.cpp's own choices."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from gym_fed.export.gguf.k_quants import k_blocks, tensor_type

ROWS, COLUMNS = 24, 1024


def weights() -> np.ndarray:
    """Of a layer, with rows of zeros, of one value, and without negative values."""
    values = np.random.default_rng(0).standard_t(5, size=(ROWS, COLUMNS)).astype(np.float32) * 0.05
    values[0], values[1], values[2] = 0, 0.5, np.abs(values[2])
    return values


@pytest.mark.parametrize(
    ("kind", "bytes_of_a_block", "most"), [("Q4_K", 144, 0.1), ("Q5_K", 176, 0.05), ("Q6_K", 210, 0.025)]
)
def test_blocks_are_read_back_by_gguf_as_what_was_quantised(
    kind: str, bytes_of_a_block: int, most: float
) -> None:
    values = weights()
    blocks = k_blocks(kind, values)
    assert blocks.shape == (ROWS, COLUMNS // 256 * bytes_of_a_block)
    found = gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, kind))
    assert np.abs(found[0]).max() == 0
    assert np.abs(found[1] - 0.5).max() < 1e-3
    loss = np.linalg.norm(found - values, axis=1)[2:] / np.linalg.norm(values, axis=1)[2:]
    assert loss.max() < most
    experts = k_blocks(kind, values.reshape(2, ROWS // 2, COLUMNS))
    assert np.array_equal(experts.reshape(blocks.shape), blocks)


def test_searched_scales_lose_less_than_the_plain_ones() -> None:
    """Q5_0 of the ``gguf`` package has one scale of each 32 values, from the largest; Q5_K has as many bits."""
    values = weights()
    plain = gguf.quants.dequantize(
        gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q5_0), gguf.GGMLQuantizationType.Q5_0
    )
    found = gguf.quants.dequantize(k_blocks("Q5_K", values), gguf.GGMLQuantizationType.Q5_K)
    assert np.linalg.norm(found - values) < 0.85 * np.linalg.norm(plain - values)


@pytest.mark.parametrize(
    ("quantization", "tensor", "row", "layer", "options", "wanted"),
    [
        ("q4_k_m", "blk.0.attn_q.weight", 2048, 0, {}, "Q4_K"),
        ("q4_k_m", "blk.0.attn_v.weight", 2048, 0, {}, "Q6_K"),
        ("q4_k_m", "blk.3.attn_v.weight", 2048, 3, {}, "Q4_K"),
        ("q5_k_m", "blk.4.ffn_down.weight", 2048, 4, {}, "Q6_K"),
        ("q5_k_m", "blk.0.ffn_down_exps.weight", 2048, 0, {}, "Q6_K"),
        ("q4_0", "blk.0.attn_v.weight", 2048, 0, {}, "Q4_0"),
        ("q4_k_m", "blk.4.attn_q.weight", 576, 4, {}, "Q5_0"),
        ("q5_k_m", "blk.4.attn_q.weight", 576, 4, {}, "Q5_1"),
        ("q4_k_m", "blk.4.attn_q.weight", 172, 4, {}, "F16"),
        ("q4_k_m", "token_embd.weight", 2048, None, {}, "Q4_K"),
        ("q4_k_m", "token_embd.weight", 2048, None, {"tied": True}, "Q6_K"),
        ("q4_0", "output.weight", 576, None, {}, "Q8_0"),
        ("q4_k_m", "blk.4.attn_k.weight", 2048, 4, {"experts": 8}, "Q8_0"),
        ("q4_k_m", "blk.4.attn_output.weight", 2048, 4, {"experts": 8}, "Q5_K"),
        ("q4_k_m", "blk.4.ffn_gate_inp.weight", 2048, 4, {"experts": 8}, None),
        ("q4_k_m", "blk.4.attn_norm.weight", 2048, 4, {}, None),
    ],
)
def test_a_tensor_gets_the_type_that_llama_cpps_quantiser_chooses(
    quantization: str, tensor: str, row: int, layer: int | None, options: dict[str, int], wanted: str | None
) -> None:
    found = tensor_type(
        quantization,
        tensor,
        row,
        layer,
        16,
        tied=bool(options.get("tied")),
        experts=options.get("experts", 0),
    )
    assert found == wanted
