"""Train eight small Llamas of one start at once: their weights stacked, so that every matrix product is one for all.

On a model this small most of a step's time is spent between the products. The steps are those of the project's trainer
(AdamW, clipping, its order of rows) for each model by itself; only the order of float32 sums differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """What the forward pass reads of a Llama's config."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Of a config with tied embeddings, no biases, SiLU and plain rotary positions: all that is computed."""
        rope = config.rope_parameters
        found = (config.model_type, config.hidden_act, rope["rope_type"], config.tie_word_embeddings)
        assert found == ("llama", "silu", "default", True), found
        assert not any((config.attention_bias, config.mlp_bias))
        return cls(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            float(rope["rope_theta"]),
        )


def train_stacked(
    start: Mapping[str, Tensor],
    shape: Shape,
    batches: Sequence[Iterator[list[list[int]]]],
    steps: int,
    rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    max_grad_norm: float,
) -> list[dict[str, Tensor]]:
    """What ``start`` becomes on each of the streams of batches."""
    count = len(batches)
    weights = {
        name: tensor.expand(count, *tensor.shape).clone().requires_grad_() for name, tensor in start.items()
    }
    optimizer = torch.optim.AdamW(list(weights.values()), rate, betas, weight_decay=weight_decay, fused=True)
    for _ in range(steps):
        ids, labels = _padded([next(stream) for stream in batches])
        counted = (labels[..., 1:] != IGNORED).sum(dim=(1, 2))
        torch.autograd.backward((_losses(weights, shape, ids, labels) / counted).sum())
        _clip(list(weights.values()), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [{name: tensor[i].detach().clone() for name, tensor in weights.items()} for i in range(count)]


def _padded(chosen: Sequence[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """``[models, rows, tokens]`` ids and labels; rows that a model lacks count for nothing."""
    rows = max(len(batch) for batch in chosen)
    tokens = max(len(row) for batch in chosen for row in batch)
    ids = torch.zeros(len(chosen), rows, tokens, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for at, batch in enumerate(chosen):
        for place, row in enumerate(batch):
            ids[at, place, : len(row)] = labels[at, place, : len(row)] = torch.tensor(row)
    return ids, labels


def _losses(weights: Mapping[str, Tensor], shape: Shape, ids: Tensor, labels: Tensor) -> Tensor:
    """``[models]`` summed negative log-likelihoods."""
    models, rows, tokens = ids.shape
    heads, shared, width = shape.heads, shape.heads // shape.kv_heads, shape.head_dim
    table = weights["model.embed_tokens.weight"]
    offsets = torch.arange(models).view(-1, 1, 1) * table.shape[1]
    hidden = functional.embedding(ids + offsets, table.flatten(0, 1)).view(models, rows * tokens, -1)
    cos, sin = _rotation(shape, tokens)
    ahead = torch.full((tokens, tokens), float("-inf")).triu(1)

    def project(values: Tensor, *names: str) -> Tensor:
        return torch.bmm(values, torch.cat([weights[f"{name}.weight"] for name in names], 1).transpose(1, 2))

    def norm(values: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + shape.eps)
        return weights[f"{name}.weight"][:, None] * (values * scale)

    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        mixed = project(
            norm(hidden, f"{prefix}.input_layernorm"),
            *(f"{attention}.{part}_proj" for part in ("q", "k", "v")),
        )
        mixed = mixed.view(models * rows, tokens, -1, width).transpose(1, 2)
        turned = mixed[:, : heads + shape.kv_heads]
        turned = turned * cos + _half_turned(turned) * sin
        query = turned[:, :heads].reshape(models * rows, shape.kv_heads, shared * tokens, width)
        scores = query @ turned[:, heads:].transpose(-1, -2) * width**-0.5
        scores = scores.view(models * rows, shape.kv_heads, shared, tokens, tokens) + ahead
        seen = scores.softmax(-1).view(models * rows, shape.kv_heads, shared * tokens, tokens)
        seen = (seen @ mixed[:, heads + shape.kv_heads :]).view(models * rows, heads, tokens, width)
        hidden = hidden + project(
            seen.transpose(1, 2).reshape(models, rows * tokens, -1), f"{attention}.o_proj"
        )
        gate, up = project(
            norm(hidden, f"{prefix}.post_attention_layernorm"), f"{mlp}.gate_proj", f"{mlp}.up_proj"
        ).chunk(2, -1)
        hidden = hidden + project(functional.silu(gate) * up, f"{mlp}.down_proj")
    logits = project(norm(hidden, "model.norm"), "model.embed_tokens").view(models, rows, tokens, -1)
    losses = functional.cross_entropy(
        logits[:, :, :-1].flatten(0, 2), labels[..., 1:].flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(models, -1).sum(1)


def _rotation(shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, ``[tokens, head_dim]``."""
    falling = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(tokens).float(), falling)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _half_turned(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _clip(weights: Sequence[Tensor], max_norm: float) -> None:
    """``clip_grad_norm_`` of every model by itself."""
    squares = [weight.grad.flatten(1).pow(2).sum(1) for weight in weights if weight.grad is not None]
    norms = torch.stack(squares).sum(0).sqrt()
    shrink = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for weight in weights:
        if weight.grad is not None:
            weight.grad.mul_(shrink.view(-1, *[1] * (weight.dim() - 1)))
