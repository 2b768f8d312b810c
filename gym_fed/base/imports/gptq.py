"""Dequantise weights in the layout of AutoGPTQ and GPTQModel, with 2, 3, 4 or 8 bits.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers". Values are
packed along the inputs, zero points along the outputs. The first version of the layout stores zero points minus one
(``checkpoint_format: gptq``, or none), the second unchanged (``gptq_v2``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_fed.base.imports.packed import (
    PACKED,
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

BITS = (2, 3, 4, 8)
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""The offset of stored zero points, by ``checkpoint_format``."""


def dequantised(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all tensors, with packed ones as ``weight = (value - zero point) * scale`` in the dtype of the scales.

    Args:
        tensors: ``qweight [inputs * bits / 32, outputs]``, ``qzeros [groups, outputs * bits / 32]``, ``scales
            [groups, outputs]`` and, if inputs were sorted (``desc_act``), ``g_idx [inputs]`` of each quantised layer,
            and the other tensors.
        config: ``quantization_config``: ``bits``, ``group_size``, ``checkpoint_format``; for layers with other bits
            or groups (``dynamic``), these are inferred from the shapes.

    Raises:
        GymError: ``MODEL_INVALID`` for an unsupported layout or wrong shapes, with the tensor's name.
    """
    layout = str(config.get("checkpoint_format") or "gptq").lower()
    if layout not in _ZERO_POINT_OFFSETS:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"quantization_config.checkpoint_format: {plain(repr(layout), 80)}: only gptq and gptq_v2 are supported",
            "use the same model in one of these layouts, or an unquantised base",
        )
    bits = integer(config, ("bits",), lambda bits: bits in BITS, "2, 3, 4 or 8")
    group_size = group_size_of(config)
    offset, mixed = _ZERO_POINT_OFFSETS[layout], bool(config.get("dynamic"))

    def weight_of(layer: Layer) -> Any:
        layer_bits = _bits_by_shape(layer) if mixed else bits
        inputs = _inputs(layer, layer_bits)
        size = _size_by_shape(layer, inputs, group_size) if mixed else group_size
        return _weight(layer, layer_bits, inputs, size, offset)

    return dequantised_layers(tensors, weight_of)


def _weight(layer: Layer, bits: int, inputs: int, group_size: int, offset: int) -> Any:
    """Dequantise one layer to ``[outputs, inputs]``."""
    outputs, groups = int(layer.qweight.shape[1]), int(layer.scales.shape[0])
    require_shape(layer, "scales", (groups, outputs), "for the outputs of qweight")
    if outputs * bits % 32:
        raise layer.refuse(
            PACKED, f"has {outputs} outputs, whose {bits}-bit zero points do not fill whole words"
        )
    require_shape(layer, "qzeros", (groups, outputs * bits // 32), f"for the scales and {bits} bits")
    group = group_of_inputs(layer, inputs, group_size)
    values = unpacked(layer.qweight, bits, 0)
    # The sum is taken modulo 2**bits: a zero point of 0 is stored as the maximum value.
    zeros = (unpacked(layer.qzeros, bits, 1) + offset) & (2**bits - 1)
    weight = (values - zeros[group]).float() * layer.scales.float()[group]
    return weight.T.contiguous().to(layer.scales.dtype)


def _inputs(layer: Layer, bits: int) -> int:
    words = int(layer.qweight.shape[0])
    if bits == 3 and words % 3:
        raise layer.refuse(PACKED, f"has {words} words per column, but 3 bits need a multiple of 3")
    return words * 32 // bits


def _bits_by_shape(layer: Layer) -> int:
    bits = int(layer.qzeros.shape[1]) * 32 / int(layer.scales.shape[1])
    if bits not in BITS:
        raise layer.refuse(
            "qzeros", f"has shape {list(layer.qzeros.shape)}, which fits none of 2, 3, 4 and 8 bits"
        )
    return int(bits)


def _size_by_shape(layer: Layer, inputs: int, configured: int) -> int:
    """Return the configured group size if it fits, else the one implied by the number of groups."""
    groups = int(layer.scales.shape[0])
    fits = configured > 0 and -(-inputs // configured) == groups
    return configured if fits else -(-inputs // groups)
