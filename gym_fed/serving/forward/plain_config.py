"""Read the ``config.json`` of a Llama, Qwen2, Qwen3 or Mistral model that ``PlainModel`` supports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.config_checks import SIZES
from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object

DECODER_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
_FOREIGN = ("quantization_config", "auto_map", "text_config", "partial_rotary_factor")
_ROPE_KEYS = {"rope_type", "rope_theta"}


@dataclass(frozen=True)
class PlainConfig:
    """The values of a config that ``PlainModel`` needs, with transformers' names.

    Attributes:
        architecture: The name of the class in transformers.
        rope_theta: The base of the rotary frequencies; models with other kinds of rope are left to transformers.
        qkv_bias: True if queries, keys and values have biases.
        output_bias: True if the attention's output has a bias.
        mlp_bias: True if the feed-forward layers have biases.
        head_norms: True if queries and keys are normalised.
        eos_token_id: The value in the file.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    eos_token_id: Any

    def get_text_config(self) -> PlainConfig:
        """Return this config; the counterpart of the method of transformers' configs."""
        return self


def plain_config(folder: Path) -> PlainConfig | None:
    """Read the config of a model folder; None if transformers must load the model.

    Missing keys are not filled in, since transformers' defaults depend on the class and change.
    """
    if (folder / "adapter_config.json").exists():
        return None
    try:
        values = read_object(folder / "config.json")
    except (OSError, GymError):  # loading the model will report it
        return None
    kind = values.get("model_type")
    if not isinstance(kind, str) or values.get("architectures") != [DECODER_CLASSES.get(kind)]:
        return None
    theta, eps, tied = _rope_theta(values), values.get("rms_norm_eps"), values.get("tie_word_embeddings")
    sizes = {key: size for key in SIZES if type(size := values.get(key)) is int and 0 < size < 1 << 31}
    if theta is None or not isinstance(eps, float) or not isinstance(tied, bool):
        return None
    if len(sizes) < len(SIZES):
        return None
    if values.get("hidden_act") != "silu" or any(values.get(key) is not None for key in _FOREIGN):
        return None
    if not _attends_to_all(kind, values):
        return None
    head_dim = _head_dim(kind, values)
    bias = values.get("attention_bias") is True
    if head_dim is None or sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        return None
    return PlainConfig(
        architecture=DECODER_CLASSES[kind],
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope_theta=theta,
        tie_word_embeddings=tied,
        qkv_bias=kind == "qwen2" or (kind != "mistral" and bias),
        output_bias=kind in ("llama", "qwen3") and bias,
        mlp_bias=kind == "llama" and values.get("mlp_bias") is True,
        head_norms=kind == "qwen3",
        eos_token_id=values.get("eos_token_id"),
        **sizes,
    )


def _rope_theta(values: dict[str, Any]) -> float | None:
    """Return the theta of an ordinary rope, in the notation of transformers 5 or older; None for any other rope."""
    rope = values.get("rope_parameters")
    if rope is None:
        rope = {"rope_type": "default", "rope_theta": values.get("rope_theta")}
        if values.get("rope_scaling") is not None:
            return None
    if not isinstance(rope, dict) or set(rope) != _ROPE_KEYS or rope["rope_type"] != "default":
        return None
    theta = rope["rope_theta"]
    return (
        float(theta) if isinstance(theta, int | float) and not isinstance(theta, bool) and theta > 0 else None
    )


def _attends_to_all(kind: str, values: dict[str, Any]) -> bool:
    """Return True if no layer has a sliding window."""
    if any(layer != "full_attention" for layer in values.get("layer_types") or ()):
        return False
    if kind == "llama":
        return values.get("sliding_window") is None
    if kind == "mistral":  # without the key, the layer has a window
        return "sliding_window" in values and values["sliding_window"] is None
    return values.get("use_sliding_window") is False


def _head_dim(kind: str, values: dict[str, Any]) -> int | None:
    dim, hidden, heads = values.get("head_dim"), values["hidden_size"], values["num_attention_heads"]
    if dim is None and kind != "qwen3" and hidden % heads == 0:
        dim = hidden // heads
    return dim if type(dim) is int and dim > 0 and dim % 2 == 0 and dim <= 1024 else None


def plain_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of ``PlainModel`` by name; a tied head is not a parameter."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.head_norms:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, cols, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    return shapes
