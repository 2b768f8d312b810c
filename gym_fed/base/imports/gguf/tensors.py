"""Dequantise the tensors of a GGUF file and write them as safetensors shards with transformers' names.

Unquantised tensors keep their dtype (f32, f16 or bf16) and are bit-identical. Quantised ones become float16, whose
rounding error (2^-12 of a value) is far below the quantisation error; tensors beyond float16's range become float32.

Every parameter of transformers' class must be in the file, and every tensor of the file must be a parameter of the
same shape: nothing stays randomly initialised, and nothing is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_fed.base.imports.gguf.header import Header, StoredTensor, invalid
from gym_fed.base.imports.importer import Report
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30
"""Maximum size of a shard; one is in memory at a time."""
_ROWS_BYTES = 64 << 20
"""Maximum size in bytes of the float32 values that are dequantised in one step."""
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values are part of the config in transformers."""
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}


@dataclass(frozen=True)
class MappedTensor:
    """A parameter and the tensor that stores it.

    Attributes:
        name: The parameter's name in transformers.
        stored: The stored tensor; for the experts' joint gate and up projections, the tensor of the gates.
        dtype: The dtype that it is converted to.
        below: The tensor with the parameter's remaining rows (dimension 1), if it is stored as two.
    """

    name: str
    stored: StoredTensor
    dtype: str
    below: StoredTensor | None = None

    @property
    def bytes(self) -> int:
        """Size in memory, in bytes."""
        return int(np.prod(self.shape)) * (4 if self.dtype == "float32" else 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter in the file."""
        shape = self.stored.shape
        return shape if self.below is None else (shape[0], shape[1] + self.below.shape[1], *shape[2:])


def mapped_tensors(header: Header, config: Any) -> list[MappedTensor]:
    """Map each parameter of the model to its tensor, in the model's order.

    Args:
        header: Header of the file, or the merged header of all parts.
        config: A transformers config.

    Raises:
        GymError: ``MODEL_INVALID`` for a missing or unexpected tensor, or one with the wrong shape.
    """
    names = _names(header, config)
    parameters = _parameters(config)
    halves = {name: _below(name) for name in names if _below(name)}
    stored = {names[name]: tensor for name, tensor in header.tensors.items() if name in names}
    expected = {*names, *halves.values(), *_COMPUTED}
    unexpected = [name for name in header.tensors if name not in expected]
    missing = [name for name in parameters if name not in stored]
    missing += [name for name in halves.values() if name not in header.tensors]
    for problem, wrong in (("lacks", missing), ("has tensors that the model does not have:", unexpected)):
        if wrong:
            shown = ", ".join(plain(name, 80) for name in wrong[:5])
            share = f"{len(wrong)} of {counted(len(header.tensors), 'tensor')}"
            raise invalid(header.file, f"{problem} {shown} ({share})")
    mapped = []
    for name, shape in parameters.items():
        below = header.tensors.get(halves.get(stored[name].name, ""))
        tensor = MappedTensor(name, stored[name], _dtype(header, stored[name]), below)
        if shape not in (tensor.shape, (1, *tensor.shape)):  # GGUF flattens a gate with one output
            raise invalid(
                header.file,
                f"tensor {stored[name].name} has shape {list(stored[name].shape)}, but {list(shape)} is expected",
            )
        mapped.append(tensor)
    return mapped


def write_tensors(header: Header, config: Any, folder: Path, report: Report) -> str:
    """Write ``model.safetensors``, or shards and their index, with one shard in memory at a time.

    Returns:
        The dtype of most values.
    """
    from safetensors.torch import save_file

    mapped = mapped_tensors(header, config)
    total, done = sum(tensor.bytes for tensor in mapped), 0
    shards = _shards(mapped)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for tensor in shard:
            tensors[tensor.name] = read_parameter(tensor, config)
            done += tensor.bytes
            report(done, total)
            files[tensor.name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    sizes: dict[str, int] = {}
    for tensor in mapped:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def values_of(stored: StoredTensor) -> np.ndarray:
    """Read a tensor as float32, in torch's order of dimensions."""
    return np.concatenate(list(_rows(stored))).reshape(stored.shape)


def stored_values(mapped: MappedTensor, config: Any) -> torch.Tensor:
    """Read a parameter as stored: float32, in transformers' row order, including ``offset_of``."""
    import torch

    values = torch.from_numpy(values_of(mapped.stored))
    if mapped.below is not None:
        values = torch.cat([values, torch.from_numpy(values_of(mapped.below))], dim=1)
    return _in_transformers_order(values, mapped, config)


def offset_of(mapped: MappedTensor, config: Any) -> int:
    """Return the offset that llama.cpp adds to a parameter: Gemma's norms multiply by one plus the weight."""
    return int(str(config.model_type).startswith("gemma") and mapped.stored.name.endswith("norm.weight"))


def _rows(stored: StoredTensor) -> Iterator[np.ndarray]:
    """Yield a tensor as ``[rows, columns]`` float32, in parts."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(stored.type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = stored.shape[-1] // block * block_bytes
    rows = stored.bytes // row
    step = max(1, _ROWS_BYTES // (stored.shape[-1] * 4))
    data = np.memmap(stored.file, dtype=np.uint8, mode="r", offset=stored.start, shape=(rows, row))
    for first in range(0, rows, step):
        part = np.array(data[first : first + step])
        if kind is GGMLQuantizationType.F32:
            yield part.view(np.float32)
        elif kind is GGMLQuantizationType.F16:
            yield part.view(np.float16).astype(np.float32)
        else:
            yield np.asarray(dequantize(part, kind), dtype=np.float32)


def read_parameter(mapped: MappedTensor, config: Any) -> torch.Tensor:
    """Read a parameter with the dtype and shape that it has in transformers.

    Raises:
        GymError: ``MODEL_INVALID`` for values that are not finite.
    """
    import torch

    parts = [_cast(stored, mapped, config) for stored in (mapped.stored, mapped.below) if stored is not None]
    return _in_transformers_order(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), mapped, config)


def _cast(stored: StoredTensor, mapped: MappedTensor, config: Any) -> torch.Tensor:
    import torch

    dtype = getattr(torch, mapped.dtype)
    parts: list[torch.Tensor] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in _rows(stored):
            if not np.isfinite(rows).all():
                raise invalid(stored.file, f"tensor {stored.name} has values that are not finite")
            part = torch.from_numpy(rows - 1 if offset_of(mapped, config) else rows)
            cast = part.to(dtype)
            if stored.type not in _PLAIN and not torch.isfinite(cast).all():
                dtype, cast = torch.float32, part
                parts = [earlier.float() for earlier in parts]
            parts.append(cast)
    return torch.cat(parts).reshape(stored.shape)


def _in_transformers_order(rows: torch.Tensor, mapped: MappedTensor, config: Any) -> torch.Tensor:
    """Restore transformers' layout: GGUF permutes Llama's query and key rows, and flattens a gate with one output."""
    if mapped.stored.name.endswith("ffn_gate_inp_shexp.weight"):
        return rows.reshape(1, -1).contiguous()
    if config.model_type in ("llama", "mistral", "mixtral") and ".attn_" in mapped.stored.name:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(mapped.stored.name.split(".")[2])
        if count is not None:
            return _halves_apart(rows, count)
    return rows.contiguous()


def _halves_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's RoPE permutation, which pairs adjacent rows instead of halves: rows 0 1 2 3 become 0 2 1 3."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape).contiguous()


def _dtype(header: Header, stored: StoredTensor) -> str:
    """Return the dtype that a tensor is converted to.

    Raises:
        GymError: ``MODEL_INVALID`` for a type that cannot be dequantised.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if stored.type in _PLAIN:
        return _PLAIN[stored.type]
    kind = GGMLQuantizationType(stored.type)
    if kind.name.startswith(("I8", "I16", "I32", "I64", "F64")):
        raise _not_read(header, stored, kind.name)
    from gguf import GGML_QUANT_SIZES

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError as error:
        raise _not_read(header, stored, kind.name) from error
    return "float16"


def _not_read(header: Header, stored: StoredTensor, kind: str) -> GymError:
    return invalid(header.file, f"tensor {plain(stored.name, 80)} is {kind}, which is not supported")


def _parameters(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the model's parameters, without a head tied to the embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = set(getattr(model, "_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def _names(header: Header, config: Any) -> Mapping[str, str]:
    """Map names in the file to transformers' names."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    general_name = header.values["general.architecture"]
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == general_name)
    known = get_tensor_name_map(architecture, config.num_hidden_layers)
    mapping = {}
    for name in _parameters(config):
        stem, dot, ending = name.rpartition(".")
        stored = known.get_name(stem) if ending in ("weight", "bias") else None
        if (match := _EXPERTS.fullmatch(name)) is not None:
            mapping[f"blk.{match[1]}.ffn_{_EXPERT_NAMES[match[2]]}_exps.weight"] = name
        elif stored is not None:
            mapping[f"{stored}{dot}{ending}"] = name
    return mapping


_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_EXPERT_NAMES = {"gate_up_proj": "gate", "down_proj": "down"}


def _below(name: str) -> str:
    """Return the tensor that holds the second half of a parameter's rows; empty if there is none."""
    return name.replace("ffn_gate_exps", "ffn_up_exps") if "ffn_gate_exps" in name else ""


def _shards(mapped: list[MappedTensor]) -> list[list[MappedTensor]]:
    shards: list[list[MappedTensor]] = [[]]
    size = 0
    for tensor in mapped:
        if shards[-1] and size + tensor.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards
