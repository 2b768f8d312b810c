"""Llama, Qwen2, Qwen3 and Mistral as plain torch modules, with the parameter names of transformers.

With them, a server starts without importing transformers' models, which takes longer than importing torch. ``Decoder``
computes the steps. The forward pass here follows the papers; the decoder is checked against it when a model is opened,
and tests compare it with transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.serving.forward.plain_config import PlainConfig
from gym_fed.serving.forward.target_modules import Kind, ModelLayout, TargetModule, TargetParameter


class PlainLinear(nn.Linear):
    """A linear layer without initialisation, since torch's initialisation would import its compiler."""

    def reset_parameters(self) -> None:
        """Do nothing: the weight is given."""


class PlainEmbedding(nn.Embedding):
    """An embedding without initialisation."""

    def reset_parameters(self) -> None:
        """Do nothing: the weight is given."""


class PlainNorm(nn.Module):
    """An RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class PlainRotary(nn.Module):
    """Computes the cosine and sine of the rotary angles of positions."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class PlainAttention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.qkv_bias
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = PlainLinear(hidden, queries, bias=bias)
        self.k_proj = PlainLinear(hidden, keys, bias=bias)
        self.v_proj = PlainLinear(hidden, keys, bias=bias)
        self.o_proj = PlainLinear(queries, hidden, bias=config.output_bias)
        if config.head_norms:
            self.q_norm = PlainNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = PlainNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        output = functional.scaled_dot_product_attention(
            _rotated(query, cosine, sine),
            _rotated(key, cosine, sine),
            value,
            is_causal=True,
            scale=self.scaling,
            enable_gqa=True,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-right, left), dim=-1) * sine[:, None]


class PlainFeedForward(nn.Module):
    """The gated feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.gate_proj, self.up_proj = PlainLinear(*sizes, bias=bias), PlainLinear(*sizes, bias=bias)
        self.down_proj = PlainLinear(*sizes[::-1], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class PlainLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = PlainAttention(config), PlainFeedForward(config)
        self.input_layernorm = PlainNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = PlainNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class PlainBody(nn.Module):
    """The model without its head."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embed_tokens = PlainEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = PlainNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = PlainRotary(config.head_dim, config.rope_theta)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cosine, sine = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.norm(x)  # type: ignore[no-any-return]


class PlainModel(nn.Module):
    """A causal LM with given weights, for serving on a CPU.

    Attributes:
        config: Its config.
        digest: The digest of its weights in float32, as in ``tensors_digest``; set by the loader.
        name_or_path: Its folder; set by the loader.
        generation_config: An object with the ``eos_token_id`` of ``generation_config.json``.
    """

    def __init__(self, config: PlainConfig) -> None:
        """Create an empty model; use ``of`` to create one with weights."""
        super().__init__()
        self.config, self.generation_config = config, SimpleNamespace(eos_token_id=None)
        self.digest = self.name_or_path = ""
        self.model = PlainBody(config)
        self.lm_head = PlainLinear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def of(cls, config: PlainConfig, weights: Mapping[str, Tensor]) -> PlainModel | None:
        """Create a model on these tensors without copying; None if they do not match its parameters one to one."""
        with torch.device("meta"):
            model = cls(config)
        parameters = dict(model.named_parameters())
        if {name: tensor.shape for name, tensor in parameters.items()} != {
            name: tensor.shape for name, tensor in weights.items()
        }:
            return None
        model.load_state_dict(dict(weights), strict=False, assign=True)
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model.requires_grad_(False).eval()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding, like transformers' models."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, like transformers' models."""
        return self.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        """Return logits ``[batch, tokens, vocabulary]`` as ``.logits``; ``use_cache`` is ignored."""
        if use_cache:
            raise NotImplementedError("steps with a cache are computed by the decoder")
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids, position_ids)))


def plain_layout(model: PlainModel, kernel: str) -> ModelLayout:
    """Return the same layout as ``ModelLayout.of``, without running the model."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    target_modules: list[TargetModule] = []
    kinds: dict[str, Kind] = {}
    for name, module in model.named_modules():
        own = {key: names[id(parameter)] for key, parameter in module.named_parameters(recurse=False)}
        if not own:
            continue
        weight, bias = own["weight"], own.get("bias")
        kinds[weight] = "matrix"
        if isinstance(module, PlainNorm):
            kinds[weight] = "norm"
            target = TargetModule(name, "norm", weight, None, eps=module.variance_epsilon)
        elif isinstance(module, nn.Embedding):
            target = TargetModule(name, "embedding", weight, None)
        else:
            target = TargetModule(name, "linear", weight, bias, head=module is model.lm_head)
        if bias is not None:
            kinds[bias] = "bias"
        target_modules.append(target)
    first = next(iter(parameters.values()))
    targets = {name: TargetParameter(tuple(tensor.shape), kinds[name]) for name, tensor in parameters.items()}
    dtype = str(first.dtype).removeprefix("torch.")
    return ModelLayout(targets, tuple(target_modules), dtype, str(first.device), kernel)


def language_part(model: Any) -> tuple[Any, Any]:
    """Return the config and body of the language model; for a vision model, those of its language part.

    The body is None for a model whose attribute for it is not named like Llama's.
    """
    text = model.config if isinstance(model, PlainModel) else model.config.get_text_config()
    return text, getattr(model, "model", None) if text is model.config else model.get_decoder()
