"""Small Llamas of the same shape, one per worker, trained together with weights ``[workers, ...]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama with tied embeddings."""

    vocabulary: int = 512
    hidden: int = 64
    mlp: int = 172
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name in transformers."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        few = self.kv_heads * self.head
        for number in range(self.layers):
            at = f"model.layers.{number}."
            for name, size in (("q", self.hidden), ("k", few), ("v", few), ("o", self.hidden)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (size, self.hidden)
            for name in ("gate", "up"):
                shapes[f"{at}mlp.{name}_proj.weight"] = (self.mlp, self.hidden)
            shapes[f"{at}mlp.down_proj.weight"] = (self.hidden, self.mlp)
            for name in ("input", "post_attention"):
                shapes[f"{at}{name}_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes

    def initial(self, seed: int) -> Weights:
        """Return random initial weights, scaled down for projections into the residual stream, as in GPT-2."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                weights[name] = torch.ones(shape)
            else:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else (0.3 if into_stream else 1.0) * shape[-1] ** -0.5
                weights[name] = torch.randn(shape, generator=generator) * std
        return weights


def logits(weights: Mapping[str, Tensor], shape: Shape, ids: Tensor) -> Tensor:
    """Return the ``[workers, rows * t, vocabulary]`` logits of ``[workers, rows, t]`` tokens."""
    workers, rows, length = ids.shape
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[torch.arange(workers)[:, None], ids.reshape(workers, -1)]
    half = 1.0 / 10000.0 ** (torch.arange(0, shape.head, 2) / shape.head)
    angles = torch.outer(torch.arange(length), half).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def linear(inputs: Tensor, name: str) -> Tensor:
        return inputs @ weights[name].transpose(1, 2)

    def norm(values: Tensor, name: str) -> Tensor:
        return rms_norm(values, values.shape[-1:], eps=1e-5) * weights[name][:, None]

    def heads(values: Tensor, rotate: bool) -> Tensor:
        split = values.reshape(workers * rows, length, -1, shape.head).transpose(1, 2)
        if rotate:
            first, second = split.chunk(2, -1)
            split = split * cos + torch.cat([-second, first], -1) * sin
        return split

    for number in range(shape.layers):
        at = f"model.layers.{number}."
        normed = norm(hidden, f"{at}input_layernorm.weight")
        query, key, value = (
            heads(linear(normed, f"{at}self_attn.{one}_proj.weight"), one != "v") for one in "qkv"
        )
        key, value = (one.repeat_interleave(shape.heads // shape.kv_heads, 1) for one in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        hidden = hidden + linear(mixed.reshape(workers, rows * length, -1), f"{at}self_attn.o_proj.weight")
        normed = norm(hidden, f"{at}post_attention_layernorm.weight")
        gate, up = (linear(normed, f"{at}mlp.{one}_proj.weight") for one in ("gate", "up"))
        hidden = hidden + linear(silu(gate) * up, f"{at}mlp.down_proj.weight")
    return norm(hidden, "model.norm.weight") @ embedding.transpose(1, 2)


def losses(weights: Mapping[str, Tensor], shape: Shape, rows: Tensor) -> Tensor:
    """Return the ``[workers]`` mean next-token cross entropy of ``[workers, rows, t + 1]`` tokens."""
    found = logits(weights, shape, rows[..., :-1])
    per_token = cross_entropy(found.flatten(0, 1), rows[..., 1:].flatten(), reduction="none")
    return per_token.view(len(rows), -1).mean(1)


class Workers:
    """Workers with one AdamW each, whose moments are kept between rounds."""

    def __init__(self, start: Weights, shape: Shape, number: int) -> None:
        self.shape, self.number = shape, number
        self.weights = {
            name: t.expand(number, *t.shape).clone().requires_grad_() for name, t in start.items()
        }
        self._optimizer = torch.optim.AdamW(
            list(self.weights.values()), 1.0, (0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, rows: Tensor, rate: float) -> None:
        """Run one step of every worker on ``[workers, rows, t + 1]`` tokens; each worker's gradient is clipped to norm
        1.
        """
        torch.autograd.backward(losses(self.weights, self.shape, rows).sum())
        gradients = [w.grad for w in self.weights.values() if w.grad is not None]
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def deltas(self, start: Weights) -> list[Weights]:
        """Return each worker's change of the weights since ``start``."""
        with torch.no_grad():
            moved = {name: w - start[name] for name, w in self.weights.items()}
        return [{name: t[i] for name, t in moved.items()} for i in range(self.number)]

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Set the weights of all workers."""
        for name, own in self.weights.items():
            own.copy_(weights[name])
