"""GGUF files of small models, by the ``gguf`` package alone, in the layout of llama.cpp's converter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PREFIX = {"llama": "llama", "qwen3": "qwen3"}
_KINDS = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: str = "f32",
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Path:
    """Write the model folder of a Llama or Qwen3 with a byte-level tokenizer.

    Args:
        folder: With ``model.safetensors``.
        file: Is written.
        kind: Of the matrices: ``f32``, ``f16``, ``q8_0`` or ``q4_0``; norms are float32.
        keys: More keys, texts or whole numbers, in place of those that it would have; None leaves one out.
        without: Tensors, by their names in the file, that are left out.
        more: Tensors that no model has.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    prefix = _PREFIX[config["model_type"]]
    writer = gguf.GGUFWriter(None, prefix)
    for key, value in (_keys(config, prefix) | _tokenizer(folder) | (keys or {})).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == prefix),
        config["num_hidden_layers"],
    )
    for name, value in load_file(folder / "model.safetensors").items():
        stem, dot, ending = name.rpartition(".")
        stored = f"{names.get_name(stem)}{dot}{ending}"
        if stored not in without:
            _tensor(writer, stored, _rotating_neighbours(stored, value.float(), config), kind)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        _tensor(writer, "rope_freqs.weight", _stretched(rope, config["head_dim"]), "f32")
    for name in more:
        _tensor(writer, name, torch.zeros(32, 32), kind)
    file.unlink(missing_ok=True)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _keys(config: dict[str, Any], prefix: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "general.type": "model",
        "general.name": "Small",
        "general.license": "apache-2.0",
        f"{prefix}.block_count": config["num_hidden_layers"],
        f"{prefix}.context_length": config["max_position_embeddings"],
        f"{prefix}.embedding_length": config["hidden_size"],
        f"{prefix}.feed_forward_length": config["intermediate_size"],
        f"{prefix}.attention.head_count": config["num_attention_heads"],
        f"{prefix}.attention.head_count_kv": config["num_key_value_heads"],
        f"{prefix}.attention.key_length": config["head_dim"],
        f"{prefix}.attention.value_length": config["head_dim"],
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{prefix}.rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        f"{prefix}.rope.dimension_count": config["head_dim"],
        f"{prefix}.vocab_size": config["vocab_size"],
    }


def _tokenizer(folder: Path) -> dict[str, Any]:
    """The keys of a byte-level tokenizer."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    whole = json.loads(loaded.backend_tokenizer.to_str())
    ids = {**whole["model"]["vocab"], **{one["content"]: one["id"] for one in whole["added_tokens"]}}
    special = {one["content"] for one in whole["added_tokens"]}
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    by_id = {number: token for token, number in ids.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [3 if token in special else 1 if token in ids else 5 for token in tokens]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in whole["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": loaded.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": loaded.chat_template,
    }
    if loaded.pad_token_id is not None:
        found["tokenizer.ggml.padding_token_id"] = loaded.pad_token_id
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if value is None or key == "general.architecture":
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def _rotating_neighbours(name: str, value: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp's order of rows for Llama: those of a head's halves alternate."""
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    key = heads.get(name.split(".", 2)[-1])
    if config["model_type"] != "llama" or key is None:
        return value
    halves = value.reshape(config[key], 2, -1, value.shape[-1])
    return halves.transpose(1, 2).reshape(value.shape)


def _stretched(rope: dict[str, Any], width: int) -> torch.Tensor:
    """What Llama 3 divides each frequency by, number by number."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    positions = rope["original_max_position_embeddings"]
    found = []
    for number in range(0, width, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (number / width)
        if wave < positions / high:
            found.append(1.0)
        elif wave > positions / low:
            found.append(float(factor))
        else:
            share = (positions / wave - low) / (high - low)
            found.append(1 / ((1 - share) / factor + share))
    return torch.tensor(found)


def _tensor(writer: Any, name: str, value: torch.Tensor, kind: str) -> None:
    import gguf

    chosen = getattr(gguf.GGMLQuantizationType, _KINDS[kind] if value.dim() > 1 else "F32")
    data = gguf.quants.quantize(np.ascontiguousarray(value.numpy()), chosen)
    writer.add_tensor(name, data, raw_dtype=chosen)
