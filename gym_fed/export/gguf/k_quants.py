"""Quantisation to GGUF's K types: blocks of 256 values in few bits, with quantised scales of sub-blocks.

Layout and scale search follow llama.cpp's quantiser without an importance matrix (``ggml-quants.c``:
``quantize_row_q4_K_ref``, ``quantize_row_q5_K_ref``, ``quantize_row_q6_K_ref``), so the quality is the same. The
``gguf`` package reads these types but cannot write them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 256
"""Values of a block; for rows that are not a multiple of it see ``FALLBACK``."""
_AT_ONCE = 4096
"""Blocks that are searched at a time: a few tens of MiB."""


def k_blocks(kind: str, values: np.ndarray) -> np.ndarray:
    """Quantise a matrix.

    Args:
        kind: ``Q4_K``, ``Q5_K`` or ``Q6_K``.
        values: ``[rows, columns] float32`` (or more dimensions); columns are a multiple of 256.

    Returns:
        ``[rows, columns / 256 * size] uint8``: blocks of 144, 176 or 210 bytes.
    """
    blocks = values.reshape(-1, BLOCK)
    chunks = (blocks[first : first + _AT_ONCE] for first in range(0, len(blocks), _AT_ONCE))
    packed = [_KINDS[kind](chunk.astype(np.float32)) for chunk in chunks]
    return np.concatenate(packed).reshape(*values.shape[:-1], -1)


def _q4(blocks: np.ndarray) -> np.ndarray:
    """Pack Q4_K: d and dmin (float16), 12 bytes of scales and minima, 128 bytes of 4-bit numbers."""
    head, levels = _with_minima(blocks, top=15, first=-1.0, tries=21)
    halves = levels.reshape(-1, 4, 2, 32)
    return np.concatenate([head, (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(-1, 128)], axis=1)


def _q5(blocks: np.ndarray) -> np.ndarray:
    """Pack Q5_K: like Q4_K, with 32 bytes of fifth bits before the low four."""
    head, levels = _with_minima(blocks, top=31, first=-0.5, tries=16)
    halves = levels.reshape(-1, 4, 2, 32)
    low, high = halves & 15, halves >> 4
    places = np.arange(8, dtype=np.uint8).reshape(1, 4, 2, 1)
    fifth = np.bitwise_or.reduce((high << places).reshape(-1, 8, 32), axis=1)
    return np.concatenate([head, fifth, (low[:, :, 0] | (low[:, :, 1] << 4)).reshape(-1, 128)], axis=1)


def _with_minima(blocks: np.ndarray, top: int, first: float, tries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first 16 bytes of each block, and ``[blocks, 8, 32] uint8`` numbers of at most ``top``.

    A value is ``d * scale * number - dmin * minimum``, with a scale and a minimum of 6 bits for each 32 values.
    """
    parts = blocks.reshape(-1, 8, 32)
    scales, minima = _scales_and_minima(parts, top, first, tries)
    d, scale_steps = _in_six_bits(scales)
    dmin, minimum_steps = _in_six_bits(minima)
    step = d.astype(np.float32)[:, None] * scale_steps
    below = dmin.astype(np.float32)[:, None] * minimum_steps
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(step[:, :, None] == 0, 0, np.rint((parts + below[:, :, None]) / step[:, :, None]))
    halves = np.stack([d, dmin], axis=1).view(np.uint8)
    head = np.concatenate([halves, _packed_scales(scale_steps, minimum_steps)], axis=1)
    return head, np.clip(levels, 0, top).astype(np.uint8)


def _scales_and_minima(
    parts: np.ndarray, top: int, first: float, tries: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[blocks, 8]`` scales and (positive) minima: the best of ``tries`` roundings.

    Scale and minimum of each rounding solve weighted least squares; larger values weigh more.
    """
    weights = np.sqrt((parts * parts).mean(axis=2, keepdims=True)) + np.abs(parts)
    lowest = np.minimum(parts.min(axis=2), 0)
    span = parts.max(axis=2) - lowest
    flat = span <= 0
    safe = np.where(flat, 1, span)
    total, weighted = weights.sum(axis=2), (weights * parts).sum(axis=2)

    def loss(scale: np.ndarray, low: np.ndarray, levels: np.ndarray) -> np.ndarray:
        off = scale[:, :, None] * levels + low[:, :, None] - parts
        return np.asarray((weights * off * off).sum(axis=2))

    def rounded(levels: float) -> np.ndarray:
        steps = np.rint((levels / safe)[:, :, None] * (parts - lowest[:, :, None]))
        return np.asarray(np.clip(steps, 0, top))

    scale, low = safe / top, lowest
    best = loss(scale, low, rounded(top))
    for number in range(tries):
        levels = rounded(top + first + 0.1 * number)
        once = (weights * levels).sum(axis=2)
        twice = (weights * levels * levels).sum(axis=2)
        product = (weights * levels * parts).sum(axis=2)
        determinant = total * twice - once * once
        with np.errstate(divide="ignore", invalid="ignore"):
            new_scale = (total * product - weighted * once) / determinant
            new_low = (twice * weighted - once * product) / determinant
            above = new_low > 0
            new_scale = np.where(above, product / twice, new_scale)
            new_low = np.where(above, 0, new_low)
            new_loss = loss(new_scale, new_low, levels)
        better = (determinant > 0) & (new_loss < best)
        best = np.where(better, new_loss, best)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
    return np.where(flat, 0, scale), -low


def _in_six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[blocks] float16`` units, and ``[blocks, 8] uint8`` multiples of them up to 63."""
    largest = np.maximum(numbers.max(axis=1), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, 63 / largest, 0).astype(np.float32)
    multiples = np.clip(np.rint(inverse[:, None] * numbers), 0, 63).astype(np.uint8)
    return (largest / 63).astype(np.float16), multiples


def _packed_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack to ``[blocks, 12] uint8``: six bits of the first four of both, with the others' upper two in free bits."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    high = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([low, middle, high], axis=1)


def _q6(blocks: np.ndarray) -> np.ndarray:
    """Pack Q6_K: 128 bytes of low and 64 of high bits, 16 scales of 8 bits, and d (float16)."""
    parts = blocks.reshape(-1, 16, 16)
    scales = _signed_scales(parts)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = np.where(largest == 0, 0, -largest / 128).astype(np.float16)
        steps = np.where(largest == 0, 0, np.rint(-128 / largest * scales))
        steps = np.clip(steps, -128, 127).astype(np.int8)
        step = d.astype(np.float32)[:, :, None] * steps.astype(np.float32)[:, :, None]
        levels = np.where(step == 0, 0, np.rint(parts / step))
    levels = (np.clip(levels, -32, 31) + 32).astype(np.uint8)
    halves = levels.reshape(-1, 2, 4, 32)
    low, high = halves & 15, halves >> 4
    lows = low[:, :, :2] | (low[:, :, 2:] << 4)
    highs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    columns = [lows.reshape(-1, 128), highs.reshape(-1, 64), steps.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(columns, axis=1)


def _signed_scales(parts: np.ndarray) -> np.ndarray:
    """Return ``[blocks, 16]`` scales of ``[blocks, 16, 16]`` values: the best of 19, weighted by squares."""
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)
    best = np.full(parts.shape[:2], -1.0, dtype=np.float32)
    scales = np.zeros(parts.shape[:2], dtype=np.float32)
    weights = parts * parts
    for offset in (0, *range(-9, 0), *range(1, 10)):  # the plain one first: only a better one replaces it
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(largest == 0, 0, -(32 + np.float32(0.1) * offset) / largest)
        levels = np.clip(np.rint(inverse * parts), -32, 31)
        product = (weights * parts * levels).sum(axis=2)
        square = (weights * levels * levels).sum(axis=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(square > 0, product / square, 0)
        kept_squares = scale * product  # the part of the weighted sum of squares that the rounding keeps
        better = kept_squares > best
        best, scales = np.where(better, kept_squares, best), np.where(better, scale, scales)
    return np.where(np.abs(largest[:, :, 0]) < 1e-15, 0, scales)


_KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6}

FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The types for such rows, as in llama.cpp; their blocks have 32 values."""
PLAIN = {"q4_0": "Q4_0", "q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K"}
"""The type of most tensors, by ``--quantization``."""
_MIXED = ("q5_k_m", "q4_k_m")
_PLAIN_MATRICES = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Suffixes of tensors that are never quantised."""
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
"""Suffixes of tensors that compute attention values, alone or combined with others."""
_EXPERTS = 8
"""With at least this many experts, attention is a small part of the model and keeps more bits."""


def tensor_type(
    quantization: str, tensor: str, row: int, layer: int | None, layers: int, *, tied: bool, experts: int = 0
) -> str | None:
    """Choose the type of a matrix as llama.cpp's quantiser does; None for a matrix that stays unquantised.

    Args:
        quantization: A key of ``PLAIN``.
        tensor: The tensor's name in the file, such as ``blk.3.attn_v.weight``.
        row: The number of values in a row.
        layer: The layer's number; None outside of layers.
        layers: The number of layers of the model.
        tied: Whether the head shares the embeddings' weights.
        experts: The number of experts in each layer.

    Returns:
        The name of a ``gguf.GGMLQuantizationType``.
    """
    if not tensor.endswith(".weight") or tensor.endswith(_PLAIN_MATRICES):
        return None
    chosen = PLAIN[quantization]
    mixed, bits = quantization in _MIXED, layer is not None and _more_bits(layer, layers)
    if tensor == "output.weight" or (tied and tensor == "token_embd.weight"):
        chosen = "Q8_0" if quantization == "q8_0" or (chosen in FALLBACK and row % BLOCK) else "Q6_K"
    elif tensor.endswith(_VALUES):
        chosen = "Q8_0" if experts == _EXPERTS else "Q6_K" if mixed and bits else chosen
    elif tensor.endswith("attn_k.weight") and experts == _EXPERTS:
        chosen = "Q8_0"
    elif mixed and bits and tensor.endswith(("ffn_down.weight", "ffn_down_exps.weight")):
        chosen = "Q6_K"
    elif quantization == "q4_k_m" and experts == _EXPERTS and tensor.endswith("attn_output.weight"):
        chosen = "Q5_K"
    if row % BLOCK and chosen in FALLBACK:
        chosen = FALLBACK[chosen]
    return chosen if row % 32 == 0 else "F16"


def _more_bits(layer: int, layers: int) -> bool:
    """Return True for the first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
