"""Dequantise weights in AutoAWQ's 4-bit GEMM layout.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization". One int32 word contains eight adjacent outputs, from the
lowest bits in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_fed.base.imports.packed import (
    Layer,
    dequantised_layers,
    group_of_inputs,
    group_size_of,
    integer,
    require_shape,
    unpacked,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in the first, second, ... four bits of a word."""
BITS = 4
_PER_WORD = 32 // BITS


def dequantised(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all tensors, with packed ones as ``weight = (value - zero point) * scale`` in the dtype of the scales.

    Args:
        tensors: ``qweight [inputs, outputs / 8]``, ``qzeros [groups, outputs / 8]`` and ``scales [groups, outputs]``
            of each quantised layer, and the other tensors.
        config: ``quantization_config``: ``bits``, ``group_size`` (or AutoAWQ's ``w_bit``, ``q_group_size``),
            ``version``.

    Raises:
        GymError: ``MODEL_INVALID`` for an unsupported layout or wrong shapes, with the tensor's name.
    """
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"quantization_config.version: {plain(repr(version), 80)}: only the AWQ layout gemm is supported",
            "use the same model in the layout gemm, or an unquantised base",
        )
    integer(config, ("bits", "w_bit"), lambda bits: bits == BITS, "4")
    group_size = group_size_of(config)
    return dequantised_layers(tensors, lambda layer: _weight(layer, group_size))


def _weight(layer: Layer, group_size: int) -> Any:
    """Dequantise one layer to ``[outputs, inputs]``."""
    inputs, num_words = (int(size) for size in layer.qweight.shape)
    outputs, groups = num_words * _PER_WORD, int(layer.scales.shape[0])
    require_shape(layer, "scales", (groups, outputs), "for the outputs of qweight")
    require_shape(layer, "qzeros", (groups, num_words), "for the groups of scales")
    group = group_of_inputs(layer, inputs, group_size)
    values, zeros = (_in_order(unpacked(words, BITS, 1)) for words in (layer.qweight, layer.qzeros))
    weight = (values - zeros[group]).float() * layer.scales.float()[group]
    return weight.T.contiguous().to(layer.scales.dtype)


def _in_order(values: Any) -> Any:
    """Reorder outputs from AWQ's packing order to ascending order."""
    import torch

    blocks = values.reshape(values.shape[0], -1, _PER_WORD)
    ordered = torch.empty_like(blocks)
    ordered[:, :, list(ORDER)] = blocks
    return ordered.reshape(values.shape)
