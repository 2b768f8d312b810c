"""Convert a GGUF header to a transformers config, with one function per architecture.

Key names follow ggml's ``docs/gguf.md``. Values that llama.cpp defines in code instead of the file are defined here
with a comment. Unknown keys are rejected instead of ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gym_fed.base.imports.gguf.header import Header, StoredTensor, invalid
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

_RESTATED = ("vocab_size", "attention.causal", "tensor_data_layout", "attention.value_length")
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
"""Low and high frequency factor of every published Llama 3 model; their 8192 original positions are recovered from the
file."""

_MAX_LAYERS = 1000
"""Maximum number of layers. Building one layer takes 10 ms; the largest published models have 126."""
_MIN_TENSORS = 6
"""Minimum number of tensors per layer: two norms, attention (two tensors in Phi-3) and the MLP (two in Phi-3)."""

RopeFactors = Callable[[str], np.ndarray]
"""Function that returns the values of a tensor in the file by name."""


def config_of(header: Header, values_of: RopeFactors) -> dict[str, Any]:
    """Convert a header to the contents of ``config.json``.

    Raises:
        GymError: ``UNAVAILABLE`` for an unsupported architecture; ``MODEL_INVALID`` for unsupported values.
    """
    name = str(header.values.get("general.architecture", ""))
    if name not in ARCHITECTURES:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{header.file}: GGUF architecture {plain(name, 40)!r} is not supported",
            f"use one of {', '.join(ARCHITECTURES)}, or the model folder that it was converted from",
        )
    keys = ArchitectureKeys(header, name)
    config = _shared(header, keys)
    ARCHITECTURES[name](config, keys, header.tensors)
    _rope(config, keys, header, values_of)
    keys.require_all_taken()
    return config


def _shared(header: Header, keys: ArchitectureKeys) -> dict[str, Any]:
    """Convert the keys that all architectures share."""
    if (embeddings := header.tensors.get("token_embd.weight")) is None:
        raise invalid(header.file, "has no tensor token_embd.weight")
    layers = keys.integer("block_count")
    if layers > min(_MAX_LAYERS, len(header.tensors) // _MIN_TENSORS):
        raise keys.refused("block_count", layers)
    if f"blk.{layers - 1}.ffn_gate_inp.weight" not in header.tensors:
        keys.must_be("expert_count", 0)
        keys.must_be("expert_used_count", 0)
    keys.ignore(*_RESTATED)
    width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head = keys.integer("attention.key_length", max(1, width // heads))
    values = header.values.get(f"{header.values['general.architecture']}.attention.value_length", head)
    if values != head:
        raise keys.refused("attention.value_length", values)
    config: dict[str, Any] = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head,
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for key in ("bos", "eos", "padding"):
        token = header.values.get(f"tokenizer.ggml.{key}_token_id")
        own = {"padding": "pad"}.get(key, key)
        config[f"{own}_token_id"] = token if isinstance(token, int) else None
    return config


def _rope(config: dict[str, Any], keys: ArchitectureKeys, header: Header, values_of: RopeFactors) -> None:
    """Convert the keys of rotary embeddings: base, width and scaling."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base", config.pop("rope_theta", 10000.0)),
    }
    width = keys.integer("rope.dimension_count", config["head_dim"])
    if width != config["head_dim"]:
        if config["model_type"] != "phi3":
            raise keys.refused("rope.dimension_count", width)
        config["partial_rotary_factor"] = rope["partial_rotary_factor"] = width / config["head_dim"]
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    keys.ignore("rope.scaling.finetuned", "rope.scaling.yarn_attn_factor")  # which llama.cpp ignores
    if kind == "linear" or (kind == "none" and factor != 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key in ("beta_fast", "beta_slow"):
            if keys.has(f"rope.scaling.yarn_{key}"):
                rope[key] = keys.number(f"rope.scaling.yarn_{key}")
        if keys.has("rope.scaling.attn_factor"):
            # llama.cpp multiplies the stated factor by YaRN's own.
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1)
    elif kind not in ("none", "longrope"):
        raise keys.refused("rope.scaling.type", kind)
    if "rope_freqs.weight" in header.tensors:
        rope |= _llama3(keys, values_of("rope_freqs.weight"), rope["rope_theta"], width)
    if "rope_factors_long.weight" in header.tensors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": values_of("rope_factors_short.weight").tolist(),
            "long_factor": values_of("rope_factors_long.weight").tolist(),
            "original_max_position_embeddings": original,
        }
        keys.ignore("rope.scaling.attn_factor")  # derived from the same two context lengths
        config["original_max_position_embeddings"] = original
    config.setdefault("rope_parameters", rope)


def _llama3(keys: ArchitectureKeys, factors: np.ndarray, theta: float, width: int) -> dict[str, Any]:
    """Recover Llama 3's RoPE scaling parameters from the per-frequency factors in the file."""
    frequencies = 1.0 / theta ** (np.arange(0, width, 2) / width)
    factor, low, high = float(factors.max()), _LLAMA3_LOW, _LLAMA3_HIGH
    waves = 2 * math.pi / frequencies
    for positions in (8192, *(1 << n for n in range(8, 21))):
        smooth = (positions / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(waves < positions / high, 1.0, np.where(waves > positions / low, factor, between))
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise keys.refused("rope_freqs.weight", factors[:8].tolist())


Tensors = Mapping[str, StoredTensor]


def _llama(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    """Convert Llama, Mistral and Mixtral, all ``llama`` in llama.cpp; only Mistral's class has a sliding window."""
    if "blk.0.ffn_gate_inp.weight" in tensors:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu"}
        config |= _experts(keys, "num_local_experts")
        return
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if keys.has("attention.sliding_window"):
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = keys.integer("attention.sliding_window")


def _qwen2(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
    config["use_sliding_window"] = False


def _qwen3(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["use_sliding_window"] = False


def _qwen2moe(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_act": "silu"}
    config |= {"use_sliding_window": False, "norm_topk_prob": False, **_experts(keys, "num_experts")}
    config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")


def _qwen3moe(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    """Convert Qwen3's mixtures; llama.cpp always normalises the weights of the chosen experts."""
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"}
    config |= {"use_sliding_window": False, "norm_topk_prob": True, **_experts(keys, "num_experts")}
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    if keys.has("expert_shared_feed_forward_length"):
        keys.ignore("expert_shared_feed_forward_length")  # the architecture has no shared expert


def _experts(keys: ArchitectureKeys, count: str) -> dict[str, int]:
    """Read the number of experts under the config's key ``count``, and how many of them a token uses."""
    return {count: keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def _phi3(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu"}
    if keys.has("attention.sliding_window") and not keys.is_zero("attention.sliding_window"):
        config["sliding_window"] = keys.integer("attention.sliding_window")


def _gemma(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    config |= {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, of_27b=46),
    }


def _gemma3(config: dict[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> None:
    """Convert Gemma 3: five sliding-window layers, with their own RoPE, between full-attention layers."""
    config |= {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    every = keys.integer("attention.sliding_window_pattern", 6)
    theta, factor = keys.number("rope.freq_base", 1_000_000.0), keys.number("rope.scaling.factor", 1.0)
    stretched = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
    layers = range(config["num_hidden_layers"])
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in layers],
        "query_pre_attn_scalar": _query_scalar(config, of_27b=62),
        "rope_theta": theta,
        "rope_parameters": {
            "full_attention": {**stretched, "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
            },
        },
    }
    keys.must_be("final_logit_softcapping", 0.0)


def _query_scalar(config: dict[str, Any], *, of_27b: int) -> int:
    """Return the query scale: llama.cpp uses the head dimension, except for the largest model (width / heads)."""
    if config["num_hidden_layers"] == of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


ARCHITECTURES: dict[str, Callable[[dict[str, Any], ArchitectureKeys, Tensors], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
"""Converters by ``general.architecture``."""
MODEL_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
"""Model types of these architectures in transformers."""


class ArchitectureKeys:
    """The keys of one architecture (``llama.*``) as typed values; unread keys can be rejected."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header, self._prefix = header, f"{architecture}."
        self._unread = {key for key in header.values if key.startswith(self._prefix)}

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a count of at least 1 that is the same for all layers."""
        value = self._read(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.refused(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number, rounded to the shortest digits that give the same float32."""
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refused(key, value)
        with np.errstate(over="ignore"):
            rounded = float(str(np.float32(value)))
        if not (math.isfinite(rounded) and rounded > 0):
            raise self.refused(key, value)
        return rounded

    def text(self, key: str, default: str) -> str:
        """Read a string."""
        value = self._read(key, default)
        if not isinstance(value, str):
            raise self.refused(key, value)
        return value

    def has(self, key: str) -> bool:
        """Return True if the file has the key."""
        return self._prefix + key in self._header.values

    def is_zero(self, key: str) -> bool:
        """Return True if a count is 0, which means none."""
        value = self._read(key, None)
        return isinstance(value, int) and value == 0

    def must_be(self, key: str, *allowed: Any) -> None:
        """Reject any value except those allowed; the key may be missing."""
        if self.has(key) and (value := self._read(key, None)) not in allowed:
            raise self.refused(key, value)

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not affect the computation, or only repeat the tensors' shapes."""
        self._unread.difference_update(self._prefix + key for key in keys)

    def require_all_taken(self) -> None:
        """Reject unread keys, since the model would compute different results.

        Raises:
            GymError: ``MODEL_INVALID`` with the unread keys.
        """
        if self._unread:
            shown = ", ".join(plain(key, 80) for key in sorted(self._unread)[:5])
            raise invalid(
                self._header.file,
                f"has unsupported settings: {shown}",
                "use the model folder that it was converted from",
            )

    def refused(self, key: str, value: Any) -> GymError:
        """Return the error for an unusable value."""
        shown = "is missing" if value is None else f"is {plain(str(value), 80)}"
        return invalid(
            self._header.file,
            f"{self._prefix}{key} {shown}, which is not supported",
            "use the model folder that it was converted from",
        )

    def _read(self, key: str, default: Any) -> Any:
        self._unread.discard(self._prefix + key)
        return self._header.values.get(self._prefix + key, default)
