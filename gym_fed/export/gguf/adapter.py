"""Write LoRA factors as a GGUF adapter, which llama.cpp applies to a base per request, and read them back.

The names of tensors are llama.cpp's own (``gguf.get_tensor_name_map``), followed by ``.lora_a`` ``[rank, in]`` and
``.lora_b`` ``[out, rank]``. llama.cpp multiplies their product by ``adapter.lora.alpha / rank``. If its converter
reorders the rows of a weight, those of B are reordered too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.nearest import LoraFactors

_ALPHA = "adapter.lora.alpha"
_KIND = "adapter.type"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Architecture:
    """llama.cpp's name for a model type, and the weights whose rows it orders differently."""

    name: str
    rotated: Mapping[str, str]
    """The suffix of a module's name, and the config key with its number of heads."""


_ARCHITECTURES = {
    "llama": _Architecture("llama", {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}),
    "qwen3": _Architecture("qwen3", {}),
}
"""Architectures by ``model_type`` of the config."""


def require_adaptable(name: str, config: Any) -> None:
    """Refuse a base with an untested architecture.

    Raises:
        GymError: ``USAGE``.
    """
    if config.model_type not in _ARCHITECTURES:
        raise GymError(
            ErrorCode.USAGE,
            f"format gguf_adapter: {name} is a {config.model_type} model, but only {', '.join(_ARCHITECTURES)} are "
            "supported",
            "export it merged, as gguf",
        )


def write_adapter(file: Path, factors: LoraFactors, config: Any, name: str) -> None:
    """Write the factors in float32.

    Args:
        file: A new file.
        factors: The factors, named like the weights they change.
        config: The config of the base.
        name: The name of the adapter, for people.

    Raises:
        GymError: ``USAGE`` naming a weight that llama.cpp does not have.
    """
    import gguf

    known = _ARCHITECTURES[config.model_type]
    names = _names(gguf, config)
    writer = gguf.GGUFWriter(file, known.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(_KIND, "lora")
    writer.add_name(name)
    writer.add_float32(_ALPHA, factors.scaling * factors.rank)
    for weight, (a, b) in sorted(factors.factors.items()):
        stored_name = names.get_name(weight, try_suffixes=(".weight",))
        if stored_name is None or (weight == "lm_head.weight" and config.tie_word_embeddings):
            raise GymError(
                ErrorCode.USAGE,
                f"format gguf_adapter: llama.cpp has no separate weight {weight} in this model",
                "export it merged, as gguf",
            )
        rows = _reordered(weight, b, config, known)
        writer.add_tensor(f"{stored_name}.lora_a", a.float().contiguous().numpy())
        writer.add_tensor(f"{stored_name}.lora_b", rows.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peft_state(file: Path, config: Any) -> tuple[dict[str, Tensor], float]:
    """Read the factors of a GGUF adapter under PEFT's names, and alpha.

    Args:
        file: A file of ``write_adapter``.
        config: The config of the base.

    Raises:
        ValueError: For a file that is not a LoRA adapter, and for a tensor that the base does not have.
    """
    import gguf

    read = gguf.GGUFReader(file)
    kind = read.get_field(_KIND)
    alpha = read.get_field(_ALPHA)
    if kind is None or kind.contents() != "lora" or alpha is None:
        raise ValueError(f"{file.name} is not a GGUF adapter")
    known = _ARCHITECTURES[config.model_type]
    names = _names(gguf, config)
    weights = {names.get_name(weight, try_suffixes=(".weight",)): weight for weight in _weights(config)}
    state = {}
    for tensor in read.tensors:
        stored_name, _, which = tensor.name.rpartition(".lora_")
        if stored_name not in weights or which not in ("a", "b"):
            raise ValueError(f"{file.name}: {tensor.name!r} is not a factor of any weight of the base")
        weight = weights[stored_name]
        values = torch.from_numpy(tensor.data.copy()).float()
        if which == "b":
            values = _reordered(weight, values, config, known, back=True)
        state[f"{_PREFIX}{weight.removesuffix('.weight')}.lora_{which.upper()}.weight"] = values
    return state, float(alpha.contents())


def _names(gguf: Any, config: Any) -> Any:
    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[config.model_type].name.upper())
    return gguf.get_tensor_name_map(architecture, config.num_hidden_layers)


def _weights(config: Any) -> list[str]:
    """Return the names of all linear layers' matrices of a base of these architectures."""
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    ends = [*attention, *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    layers = range(config.num_hidden_layers)
    return [*(f"model.layers.{layer}.{end}.weight" for layer in layers for end in ends), "lm_head.weight"]


def _reordered(weight: str, rows: Tensor, config: Any, known: _Architecture, *, back: bool = False) -> Tensor:
    """Reorder rows of ``[out, rank]`` to llama.cpp's rotary positions, or ``back`` from them.

    transformers rotates the first half of a head with its second half; llama.cpp's ``llama`` rotates neighbours.
    """
    key = known.rotated.get(weight.removesuffix(".weight").rpartition(".")[2])
    if key is None:
        return rows
    heads = getattr(config, key)
    half = rows.shape[0] // heads // 2
    apart = (heads, half, 2, rows.shape[1]) if back else (heads, 2, half, rows.shape[1])
    return rows.reshape(apart).transpose(1, 2).reshape(rows.shape)
