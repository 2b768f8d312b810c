"""A federation of stories260K for ``robust_private.py``: LoRA of rank 1 with a frozen A on all linear layers.

Shakespeare speeches are cut into sequences and distributed at random, so that contributors' data are similar. Only B is
trained and sent (d = 3,000). All contributors are trained in one batch with the base's layers shared and a separate B
each. ``Stories`` has the interface of ``_digits.Digits``: an "image" is a sequence of tokens, and its "labels" are the
next tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _digits import ROOT_IMAGES, Losses, Schedule
from _sequences import encoded, speeches
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from gym_fed.base.models import load_model

TOKENS, TEST, SEARCHED = 33, 400, 100
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Llama:
    """The forward pass of stories260K for ``[b, d]`` models, each of which has a B of rank 1 for every linear layer."""

    def __init__(self, folder: str) -> None:
        loaded = load_model(folder)
        self.tokenizer, config = loaded.tokenizer, loaded.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.groups = self.heads // config.num_key_value_heads
        self.head, self.eps = config.head_dim, config.rms_norm_eps
        self.tensors = {
            name.removeprefix("model."): t.detach().float() for name, t in loaded.model.named_parameters()
        }
        generator = torch.Generator().manual_seed(0)
        self.places: dict[str, slice] = {}
        self.first_factors: dict[str, Tensor] = {}
        at = 0
        for name, tensor in self.tensors.items():
            if name.split(".")[-2] in LINEAR:
                rows, columns = tensor.shape
                self.places[name] = slice(at, at + rows)
                self.first_factors[name] = torch.randn(columns, generator=generator) / columns**0.5
                at += rows
        self.dimension = at
        half = 1.0 / 10000.0 ** (torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(torch.arange(512), half).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        ids = torch.arange(2 * 16).view(2, 16)
        with torch.no_grad():
            ours, theirs = self.logits(torch.zeros(1, at), ids[None])[0], loaded.model(input_ids=ids).logits
        assert torch.allclose(ours, theirs, atol=1e-3), (ours - theirs).abs().max()

    def logits(self, models: Tensor, ids: Tensor) -> Tensor:
        """Return the ``[b, m, t, vocabulary]`` logits of ``[b, m, t]`` tokens."""
        batch, rows, length = ids.shape
        embedding = self.tensors["embed_tokens.weight"]
        hidden = embedding[ids]
        cos, sin = self.cos[:length], self.sin[:length]

        def layer(inputs: Tensor, name: str) -> Tensor:
            own = models[:, self.places[name]]
            along = inputs @ self.first_factors[name]
            return linear(inputs, self.tensors[name]) + along[..., None] * own[:, None, None]

        def split(values: Tensor, turn: bool) -> Tensor:
            heads = values.reshape(batch * rows, length, -1, self.head).transpose(1, 2)
            if turn:
                first, second = heads.chunk(2, -1)
                heads = heads * cos + torch.cat([-second, first], -1) * sin
            return heads

        for number in range(self.layers):
            at = f"layers.{number}."
            normed = self._norm(hidden, f"{at}input_layernorm.weight")
            query, key, value = (
                split(layer(normed, f"{at}self_attn.{one}_proj.weight"), one != "v") for one in "qkv"
            )
            key, value = (one.repeat_interleave(self.groups, 1) for one in (key, value))
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
            hidden = hidden + layer(mixed.reshape(batch, rows, length, -1), f"{at}self_attn.o_proj.weight")
            normed = self._norm(hidden, f"{at}post_attention_layernorm.weight")
            gate, up = (layer(normed, f"{at}mlp.{one}_proj.weight") for one in ("gate", "up"))
            hidden = hidden + layer(silu(gate) * up, f"{at}mlp.down_proj.weight")
        return linear(self._norm(hidden, "norm.weight"), embedding)

    def loss(self, models: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the ``[b]`` mean cross entropy, with infinity in place of NaN."""
        found = cross_entropy(self.logits(models, ids).flatten(0, 2), labels.flatten(), reduction="none")
        return torch.nan_to_num(found.view(len(models), -1).mean(1), nan=torch.inf)

    def gradient(self, models: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the ``[b, d]`` gradient of the mean cross entropy."""
        models = models.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.loss(models, ids, labels).sum(), models)
        return found

    def _norm(self, values: Tensor, name: str) -> Tensor:
        return rms_norm(values, values.shape[-1:], self.tensors[name], self.eps)


class Stories:
    """The data of a federation for S seeds."""

    def __init__(self, seeds: Sequence[int], contributors: int, malicious: int, shared: Path) -> None:
        self.seeds, self.contributors, self.malicious = tuple(seeds), contributors, malicious
        self.honest = contributors - malicious
        self.coordinator = range(contributors, contributors + 1)
        self.network = Llama(str(shared / "models" / "stories260K"))
        rows = [row for speaker in speeches(shared) for row in speaker]
        packed = [ids for ids, _ in encoded(self.network.tokenizer, rows, TOKENS) if len(ids) == TOKENS]
        sequences = torch.stack(packed)
        self._held, tests, trains = [], [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(1000 + seed)
            order = torch.randperm(len(sequences), generator=generator)
            tests.append(sequences[order[:TEST]])
            trains.append(sequences[order[TEST:]])
            # The coordinator's sequences come first; contributors share the others.
            others = torch.arange(ROOT_IMAGES, len(trains[-1]))
            parts = list(others.tensor_split(self.honest))
            size = len(others) // self.honest
            parts += [
                others[torch.randperm(len(others), generator=generator)[:size]] for _ in range(malicious)
            ]
            self._held.append([*parts, torch.arange(ROOT_IMAGES)])
        self._train, self._test = torch.stack(trains), torch.stack(tests)
        searched = self._train[:, ROOT_IMAGES : ROOT_IMAGES + SEARCHED]
        self.images, self.labels = searched[..., :-1], searched[..., 1:]
        """``[S, SEARCHED, t]`` training sequences on which attacks search their strength."""

    def first_model(self) -> Tensor:
        """Return the ``[S, d]`` initial model, which is the base."""
        return torch.zeros(len(self.seeds), self.network.dimension)

    def train(
        self,
        model: Tensor,
        schedule: Schedule,
        who: range,
        generator: torch.Generator,
        poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return the ``[S, len(who), d]`` deltas of a round of local SGD from ``model`` ``[S, d]``."""
        found = []
        assert schedule.lr is not None
        for start, held, sequences in zip(model, self._held, self._train, strict=True):
            weights = start.expand(len(who), -1).clone()
            velocity = torch.zeros_like(weights)
            for _ in range(schedule.steps):
                chosen = torch.stack(
                    [
                        held[k][torch.randint(len(held[k]), (schedule.batch,), generator=generator)]
                        for k in who
                    ]
                )
                ids, labels = sequences[chosen][..., :-1], sequences[chosen][..., 1:]
                if poison is not None:
                    ids, labels = poison(ids, labels)
                    labels = labels % len(self.network.tensors["embed_tokens.weight"])
                velocity = schedule.momentum * velocity + self.network.gradient(weights, ids, labels)
                weights = weights - schedule.lr * velocity
            found.append(weights - start)
        return torch.stack(found)

    def coordinators_losses(self, model: Tensor) -> list[Losses]:
        """Return, for each seed, the loss on the coordinator's sequences with soups added to ``model`` ``[S, d]``."""

        @torch.no_grad()
        def losses(seed: int, soups: Tensor) -> Tensor:
            ids = self._train[seed, :ROOT_IMAGES].expand(len(soups), -1, -1)
            return self.network.loss(model[seed] + soups, ids[..., :-1], ids[..., 1:])

        return [functools.partial(losses, seed) for seed in range(len(model))]

    @torch.no_grad()
    def score(self, model: Tensor) -> Tensor:
        """Return the ``[S]`` negative loss on the held-out sequences, in nats per token."""
        losses = [
            self.network.loss(one[None], ids[None, :, :-1], ids[None, :, 1:])
            for one, ids in zip(model, self._test, strict=True)
        ]
        return -torch.cat(losses)
