"""Rotary positions in GGUF: what llama.cpp supports, and the comparison of a file's rotations with the source's.

llama.cpp computes YaRN with ``beta_fast`` 32 and ``beta_slow`` 1 for nearly all architectures, regardless of the file
(``llama-context.cpp``). It multiplies rotations by ``rope.scaling.attn_factor * (0.1 ln factor + 1)``, and ignores the
key ``rope.scaling.yarn_attn_factor`` that its converter writes. It has no dynamic NTK scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gym_fed.base.imports.gguf.config import MODEL_TYPES
from gym_fed.core.text import counted

_RTOL = 1e-4
"""The largest relative error of a frequency: GGUF stores divisors and bases as float32."""
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_UNWINDOWED = ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Model types with a window in transformers, but not in llama.cpp (``src/models``)."""
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Model types in which every Nth layer has no window."""
_MIN_WINDOW = 256
"""Minimum size in tokens of a window that llama.cpp lacks; the export check uses shorter texts."""
_LLAMA_CPP_KINDS = ("default", "linear", "yarn", "llama3", "longrope", "dynamic", "proportional")


def rope_refusal(config: Any) -> str:
    """Return why llama.cpp cannot compute the model's rotations; empty if it can."""
    for rope in _by_layer_type(config).values():
        kind = rope.get("rope_type", "default")
        if kind not in _LLAMA_CPP_KINDS:
            return f"llama.cpp does not support RoPE scaling of type {kind}"
        betas = {key: float(rope.get(key) or value) for key, value in _BETAS.items()}
        if kind == "yarn" and betas != _BETAS and config.model_type not in ("mistral3", "ministral3"):
            stated = ", ".join(f"{key} {value:g}" for key, value in betas.items())
            return f"its YaRN scaling has {stated}, but llama.cpp always uses 32 and 1"
    return ""


def window_refusal(config: Any) -> str:
    """Return how llama.cpp's sliding windows differ from the model's; empty if short texts are unaffected.

    The pattern of Gemma's windows is part of its code (``src/models/gemma3.cpp``), not of the file.
    """
    layers = getattr(config, "layer_types", None) or []
    every = _FULL_EVERY.get(config.model_type)
    kinds = ("full_attention", "sliding_attention")
    if every and layers != [kinds[(number + 1) % every != 0] for number in range(len(layers))]:
        return (
            f"llama.cpp supports only full attention in one layer of every {every}, and sliding windows in the "
            "others"
        )
    if 0 < (window := _missing_window(config)) < _MIN_WINDOW:
        return f"llama.cpp has no sliding window for {config.model_type}, whose window is {counted(window, 'token')}"
    return ""


def _missing_window(config: Any) -> int:
    """Return the size in tokens of the sliding window, if llama.cpp does not compute it; otherwise 0."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    window = int(getattr(config, "sliding_window", None) or 0)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    is_missing = config.model_type in _UNWINDOWED and "sliding_attention" in layers and window < positions
    return window if is_missing else 0


def rope_notes(config: Any) -> list[str]:
    """Return what llama.cpp computes differently in long texts: dynamic scaling, and windows that it lacks."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    notes = []
    if "dynamic" in {rope.get("rope_type") for rope in _by_layer_type(config).values()}:
        notes.append(
            "dynamic RoPE scaling is not stored in GGUF: the exported model is exact only up to "
            f"{counted(positions, 'token')}"
        )
    if window := _missing_window(config):
        notes.append(
            f"llama.cpp has no sliding window for {config.model_type}: the exported model is exact only up to "
            f"{counted(window, 'token')}, and attends to all tokens of longer texts"
        )
    return notes


def rope_keys(config: Any) -> dict[str, float]:
    """Return the keys that the converter does not write, without the architecture prefix."""
    rope = _by_layer_type(config).get("full_attention") or next(iter(_by_layer_type(config).values()), {})
    if rope.get("rope_type") != "yarn" or config.model_type not in MODEL_TYPES:  # others have their own keys
        return {}
    _, scaling = next(iter(rotations(config, 0).values()))
    return {"rope.scaling.attn_factor": scaling / (0.1 * math.log(rope["factor"]) + 1)}


def rotations(config: Any, length: int) -> dict[str, tuple[np.ndarray, float]]:
    """Compute the frequencies ``[rotated / 2]`` and the factor of rotations, by layer type.

    Args:
        config: The config of a transformers model.
        length: The number of tokens of the sequence, which selects the factors of LongRoPE; 0: a short one.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    result = {}
    for layer_type, rope in _by_layer_type(config).items():
        kind = rope.get("rope_type", "default")
        if kind in ("default", "dynamic"):  # dynamic: up to the context length
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            width = int(head * (rope.get("partial_rotary_factor") or 1))
            plain = 1.0 / float(rope["rope_theta"]) ** (np.arange(0, width, 2, dtype=np.float64) / width)
            result[layer_type] = (plain, 1.0)
        else:
            named = {"layer_type": layer_type} if layer_type else {}
            device = torch.device("cpu")
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length or None, **named)
            result[layer_type] = (frequencies.double().numpy(), float(scaling))
    return result


def different_rotations(file_config: Any, config: Any) -> str:
    """Compare a file's rotations with the source's, for short sequences and for the longest.

    Returns:
        The difference; empty if there is none.
    """
    for length in (0, int(config.max_position_embeddings)):
        expected, stored = rotations(config, length), rotations(file_config, length)
        for layer_type, (frequencies, scaling) in expected.items():
            other, factor = stored.get(layer_type, next(iter(stored.values())))
            where = f" of {layer_type}" if layer_type else ""
            if other.shape != frequencies.shape or not np.allclose(other, frequencies, rtol=_RTOL, atol=0):
                kind = _by_layer_type(config)[layer_type].get("rope_type", "default")
                kind += ", tensor rope_freqs.weight" if kind == "llama3" else ""
                return f"the rotary frequencies{where} are not those of the source's RoPE scaling ({kind})"
            if not math.isclose(factor, scaling, rel_tol=_RTOL):
                return f"the rotation factor{where} is {factor:.5g}, not {scaling:.5g}"
    return ""


def _by_layer_type(config: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the rotary parameters by layer type; under an empty name if all layers share them."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return {name: value for name, value in parameters.items() if isinstance(value, dict)}
    return {"": parameters} if parameters else {}
