"""The malicious clients' view of a round, and their search for the most harmful update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from _defences import Defence
from _digits import Digits, Losses, Schedule
from torch import Tensor

SEARCH_IMAGES = 400
"""Number of training images on which a search measures the loss."""


@dataclass
class Scene:
    """The malicious clients' view of a round.

    Attributes:
        data: The federation.
        schedule: Training settings of the honest contributors.
        defence: The rule in use.
        packed: True if updates are sign bits with one scale per tensor.
        model: ``[S, d]`` model before the round.
        updates: ``[S, h, d]`` honest updates as sent.
        deltas: ``[S, h, d]`` honest updates before their encoding.
        root: ``[S, d]`` own update of the coordinator.
        losses: Loss on the coordinator's images with soups added to ``model``, for each seed.
        generator: Random generator of the malicious clients.
        memory: Values that malicious clients keep from round to round.
    """

    data: Digits
    schedule: Schedule
    defence: Defence
    packed: bool
    model: Tensor
    updates: Tensor
    deltas: Tensor
    root: Tensor
    losses: list[Losses]
    generator: torch.Generator
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def malicious(self) -> int:
        return self.data.malicious

    @property
    def mean(self) -> Tensor:
        """Return the ``[S, d]`` mean of the honest deltas."""
        mean: Tensor = self.deltas.mean(1)
        return mean

    @property
    def deviation(self) -> Tensor:
        """Return the ``[S, d]`` standard deviation of the honest deltas."""
        deviation: Tensor = self.deltas.std(1)
        return deviation

    @property
    def norm(self) -> Tensor:
        """Return the ``[S, 1]`` median norm of the honest updates."""
        median: Tensor = self.updates.norm(dim=2).median(1).values[:, None]
        return median

    def sent(self, updates: Tensor) -> Tensor:
        """Convert updates to the format of the round."""
        return self.data.network.signs(updates) if self.packed else updates

    def together(self, update: Tensor) -> Tensor:
        """Convert ``[S, d]`` to ``[S, f, d]``, with the same update from every malicious client."""
        return update[:, None].expand(-1, self.malicious, -1)

    def trained(self, poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Return the ``[S, f, d]`` deltas of training on the malicious clients' samples."""
        who = range(self.data.honest, self.data.contributors)
        return self.data.train(self.model, self.schedule, who, self.generator, poison)

    def furthest(self, candidates: Iterable[Tensor], direction: Tensor) -> Tensor:
        """Return, for each seed, the ``[S, f, d]`` candidate that moves the soup furthest along ``[S, d]``."""
        return self._best(candidates, lambda soups: (soups * direction).sum(1))

    def worst(self, candidates: Iterable[Tensor]) -> Tensor:
        """Return, for each seed, the ``[S, f, d]`` candidate after which the loss is largest."""
        images, labels = self.data.images[:, :SEARCH_IMAGES], self.data.labels[:, :SEARCH_IMAGES]
        return self._best(
            candidates, lambda soups: self.data.network.loss(self.model + soups, images, labels)
        )

    def _best(self, candidates: Iterable[Tensor], harm_of: Callable[[Tensor], Tensor]) -> Tensor:
        best = harm = None
        for candidate in candidates:
            sent = self.sent(candidate)
            rounds = torch.cat([self.updates, sent], 1)
            each = zip(rounds, self.root, self.losses, strict=True)
            soups = torch.stack([self.defence.expected(*one) for one in each])
            found = harm_of(soups)
            if best is None or harm is None:
                best, harm = sent.clone(), found
            else:
                best[found > harm] = sent[found > harm]
                harm = torch.maximum(harm, found)
        if best is None:
            raise ValueError("there is nothing to choose from")
        return best


class LongScene(Scene):
    """A round in which all malicious updates, including search candidates, have the maximum length of the rule."""

    def sent(self, updates: Tensor) -> Tensor:
        return unit(super().sent(updates)) * (self.defence.max_length * self.norm)[:, None]


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors ``[..., d]`` to norm 1; zero vectors remain zero."""
    lengths: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / lengths.clamp_min(1e-12)
