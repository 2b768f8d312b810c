"""Shared code for the AWQ and GPTQ layouts: low-bit weights packed into int32 words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

PACKED = "qweight"
"""Suffix of a packed weight, next to its zero points, scales and groups."""
BESIDE = ("qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class Layer:
    """The packed tensors of one linear layer.

    Attributes:
        name: Name of the layer, such as ``model.layers.0.mlp.up_proj``.
        qweight: Packed weights, two-dimensional int32.
        qzeros: Packed zero points, ``[groups, ...] int32``.
        scales: ``[groups, outputs]``, floating-point.
        g_idx: The group of each input, ``[inputs] int32``; None if the groups are in order.
    """

    name: str
    qweight: Any
    qzeros: Any
    scales: Any
    g_idx: Any

    def refuse(self, part: str, why: str) -> TensorInvalid:
        """Return an error that names one of the tensors."""
        return TensorInvalid(f"{self.name}.{part}", why)


class TensorInvalid(GymError):
    """The error for an invalid tensor (``MODEL_INVALID``).

    Args:
        tensor: Name of the tensor.
        why: Description of the problem.
    """

    def __init__(self, tensor: str, why: str) -> None:
        super().__init__(
            ErrorCode.MODEL_INVALID,
            f"tensor {tensor[:200]}: {why}",
            "fetch the model again, or use another one",
        )
        self.tensor = tensor


def dequantised_layers(
    tensors: Mapping[str, Any], weight_of: Callable[[Layer], Any]
) -> Iterator[tuple[str, Any]]:
    """Yield all tensors of a model, with a plain ``weight`` instead of each layer's packed tensors.

    Args:
        tensors: Tensors by name; read one layer at a time.
        weight_of: Computes the weight of a layer, ``[outputs, inputs]``.

    Raises:
        TensorInvalid: For a missing, unexpected or invalid tensor.
    """
    names = set(tensors)
    layers = {name.removesuffix(f".{PACKED}") for name in names if name.endswith(f".{PACKED}")}
    if not any(name.rpartition(".")[2] in (PACKED, *BESIDE) for name in names):
        raise TensorInvalid(
            f"*.{PACKED}", "there is none, but quantization_config says that weights are packed"
        )
    for name in tensors:
        stem, _, part = name.rpartition(".")
        if stem in layers and part in BESIDE:
            continue
        if part == PACKED:
            yield f"{stem}.weight", weight_of(_layer(tensors, stem, names))
        elif part in BESIDE:
            raise TensorInvalid(name, f"has no {stem}.{PACKED} next to it")
        elif stem in layers and part == "weight":
            raise TensorInvalid(name, f"exists next to {stem}.{PACKED}, so the weight is ambiguous")
        else:
            yield name, tensors[name]


def _layer(tensors: Mapping[str, Any], stem: str, names: set[str]) -> Layer:
    for part in ("qzeros", "scales"):
        if f"{stem}.{part}" not in names:
            raise TensorInvalid(f"{stem}.{part}", f"is missing next to {stem}.{PACKED}")
    g_idx = tensors[f"{stem}.g_idx"] if f"{stem}.g_idx" in names else None
    if g_idx is not None and g_idx.numel() == 0:
        g_idx = None
    qweight, qzeros, scales = (tensors[f"{stem}.{part}"] for part in (PACKED, "qzeros", "scales"))
    layer = Layer(stem, qweight, qzeros, scales, g_idx)
    _require_kinds(layer)
    return layer


def _require_kinds(layer: Layer) -> None:
    import torch

    for part in (PACKED, "qzeros", "scales"):
        value = getattr(layer, part)
        if value.ndim != 2 or 0 in value.shape:
            raise layer.refuse(
                part, f"has shape {list(value.shape)}, but two non-empty dimensions are required"
            )
        is_valid = value.is_floating_point() if part == "scales" else value.dtype is torch.int32
        if not is_valid:
            kind = "a floating-point type" if part == "scales" else "int32"
            raise layer.refuse(part, f"is {value.dtype}, but {kind} is required")
    if not bool(layer.scales.isfinite().all()):
        raise layer.refuse("scales", "has values that are not finite")


def require_shape(layer: Layer, part: str, expected: tuple[int, ...], because: str) -> None:
    """Reject a tensor whose shape is not ``expected``.

    Raises:
        GymError: ``MODEL_INVALID`` with both shapes.
    """
    actual = tuple(getattr(layer, part).shape)
    if actual != expected:
        raise layer.refuse(part, f"has shape {list(actual)}, but {list(expected)} is required {because}")


def group_of_inputs(layer: Layer, inputs: int, group_size: int) -> Any:
    """Return the group of each input, ``[inputs]`` int64.

    Args:
        layer: A layer with ``g_idx``, or with groups in order.
        inputs: Input dimension of the layer.
        group_size: Inputs per group; -1 for one group.

    Raises:
        GymError: ``MODEL_INVALID`` for a wrong number of groups, or a ``g_idx`` that does not fit them.
    """
    import torch

    groups = int(layer.scales.shape[0])
    size = inputs if group_size == -1 else group_size
    needed = -(-inputs // size)
    if groups != needed:
        raise layer.refuse(
            "scales", f"has {counted(groups, 'group')}, but {inputs} inputs in groups of {size} need {needed}"
        )
    if layer.g_idx is None:
        return torch.arange(inputs) // size
    require_shape(layer, "g_idx", (inputs,), "for the inputs of qweight")
    if layer.g_idx.is_floating_point():
        raise layer.refuse("g_idx", f"is {layer.g_idx.dtype}, but integers are required")
    groups_of_inputs = layer.g_idx.long()
    if int(groups_of_inputs.min()) < 0 or int(groups_of_inputs.max()) >= groups:
        raise layer.refuse("g_idx", f"refers to groups beyond the {groups} that exist")
    return groups_of_inputs


def unpacked(words: Any, bits: int, dim: int) -> Any:
    """Unpack low-bit values from int32 words, lowest bits first.

    Args:
        words: Packed int32 words, ``values * bits / 32`` along ``dim``.
        bits: Bits per value: 2, 3, 4 or 8. With 3, some values span two words.
        dim: The packed dimension.

    Returns:
        int32 values in ``[0, 2**bits)``.
    """
    import torch

    words = words.movedim(dim, -1)
    span = 3 if bits == 3 else 1  # smallest number of words with an integral number of values
    in_span = 32 * span // bits
    blocks = words.reshape(*words.shape[:-1], -1, span)
    values = torch.empty(*blocks.shape[:-1], in_span, dtype=torch.int32)
    for number in range(in_span):
        word, offset = divmod(number * bits, 32)
        low = (blocks[..., word] >> offset) & (2 ** min(bits, 32 - offset) - 1)
        if offset + bits > 32:
            low = low | ((blocks[..., word + 1] & (2 ** (offset + bits - 32) - 1)) << (32 - offset))
        values[..., number] = low
    return values.reshape(*words.shape[:-1], -1).movedim(-1, dim)


def integer(
    config: Mapping[str, Any], names: tuple[str, ...], allowed: Callable[[int], bool], text: str
) -> int:
    """Read an integer from ``quantization_config``.

    Args:
        config: The ``quantization_config`` section.
        names: The key and its alternative names.
        allowed: Returns True for an allowed value.
        text: Description of the allowed values for the error message.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    for name in names:
        if name in config:
            value = config[name]
            if isinstance(value, bool) or not isinstance(value, int) or not allowed(value):
                break
            return value
    raise GymError(
        ErrorCode.MODEL_INVALID,
        f"quantization_config.{names[0]}: {plain(repr(config.get(names[0])), 80)}, but {text} is required",
        "use an unquantised base",
    )


def group_size_of(config: Mapping[str, Any]) -> int:
    """Return the number of inputs per group; -1 for a single group."""
    return integer(
        config, ("group_size", "q_group_size"), lambda size: size == -1 or size > 0, "a size or -1"
    )
