"""A federation on images of digits: data split by label, and contributors that all train in one batch.

All contributors of all seeds are one batch of small perceptrons, so that a round takes milliseconds. As in ByzFL, the
honest contributors hold all of the training data; each malicious client has a sample of everything, which is more than
a real one would know. The coordinator has ``ROOT_IMAGES`` clean images of its own, which are nobody's else and not in
the test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from _images import Images, image_set
from torch import Tensor

LABELS = 10
ROOT_IMAGES = 100
"""Of the coordinator's, as in Cao et al. 2021."""
FEWEST = 8
"""Images that every honest contributor has at least; splits with fewer are drawn again."""

Split = Literal["iid", "dirichlet", "lone"]
"""All alike; Dirichlet(0.1) over the labels; that, and the first contributor alone holds label 9 and nothing else."""

HeldOut = Literal["test", "validation"]
"""On what a model is judged: the test part, or as many rows of the training part, which then nobody trains on."""


@dataclass(frozen=True)
class Schedule:
    """How the honest train; the same for all rules and attacks.

    Attributes:
        rounds: Rounds.
        steps: Local steps of SGD a round.
        batch: Images a step.
        lr: Learning rate; the data set's own when absent.
        momentum: Of the local SGD, anew every round.
    """

    rounds: int = 80
    steps: int = 10
    batch: int = 32
    lr: float | None = None
    momentum: float = 0.9


class Digits:
    """The data of a federation, once for each seed; S seeds are trained side by side."""

    def __init__(
        self,
        seeds: Sequence[int],
        contributors: int,
        malicious: int,
        split: Split,
        data: str = "digits",
        held_out: HeldOut = "test",
    ) -> None:
        self.seeds, self.contributors, self.malicious = tuple(seeds), contributors, malicious
        self.set = image_set(data)
        self.network = self.set.network
        drawn = [_draw(self.set, seed, contributors, malicious, split, held_out) for seed in seeds]
        self.images, self.labels, self.test_images, self.test_labels = (
            torch.stack(part) for part in zip(*(one[:4] for one in drawn), strict=True)
        )
        """``[S, images, inputs]`` float32 and ``[S, images]`` int64, training and held-out part."""
        self.holdings = [one[4] for one in drawn]
        """For every seed and contributor, and last for the coordinator, which of the training images it holds."""
        longest = max(len(held) for one in self.holdings for held in one)
        self._counts = torch.tensor([[len(held) for held in one] for one in self.holdings])
        self._index = torch.tensor(
            np.stack([[np.resize(held, longest) for held in one] for one in self.holdings])
        )

    @property
    def honest(self) -> int:
        return self.contributors - self.malicious

    @property
    def coordinator(self) -> range:
        """Who holds the clean images, for ``train``."""
        return range(self.contributors, self.contributors + 1)

    def counts(self, seed_index: int) -> np.ndarray:
        """``[honest, 10]`` images of each label."""
        labels = self.labels[seed_index].numpy()
        return np.stack(
            [np.bincount(labels[h], minlength=LABELS) for h in self.holdings[seed_index][: self.honest]]
        )

    def first_model(self) -> Tensor:
        """``[S, d]`` weights."""
        return torch.stack([self.network.first(seed) for seed in self.seeds])

    def train(
        self,
        model: Tensor,
        schedule: Schedule,
        who: range,
        generator: torch.Generator,
        poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """``[S, len(who), d]``: what a round of local training adds to ``model`` ``[S, d]``."""
        seeds, number, network = len(self.seeds), len(who), self.network
        start = model[:, None].expand(seeds, number, network.dimension).reshape(-1, network.dimension)
        weights, velocity = start.clone(), torch.zeros_like(start)
        counts, index = self._counts[:, who.start : who.stop], self._index[:, who.start : who.stop]
        rows = torch.arange(seeds)[:, None, None]
        for _ in range(schedule.steps):
            drawn = torch.rand(seeds, number, schedule.batch, generator=generator) * counts[..., None]
            chosen = index.gather(2, drawn.long())
            images = self.images[rows, chosen].view(seeds * number, -1, network.inputs)
            labels = self.labels[rows, chosen].view(seeds * number, -1)
            if poison is not None:
                images, labels = poison(images, labels)
            velocity.mul_(schedule.momentum).add_(network.gradient(weights, images, labels))
            weights.sub_(velocity, alpha=schedule.lr or self.set.lr)
        return (weights - start).view(seeds, number, network.dimension)

    def correct(self, model: Tensor) -> Tensor:
        """``[S, images]`` bool, of the held-out part."""
        return self.network.logits(model, self.test_images).argmax(-1) == self.test_labels


def _draw(
    data: Images, seed: int, contributors: int, malicious: int, split: Split, held_out: HeldOut
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[np.ndarray]]:
    generator = np.random.default_rng(1000 + seed)
    order = np.random.default_rng(0).permutation(len(data.images)) if data.fixed_test else None
    if order is None:
        order = generator.permutation(len(data.images))
    held, rest = order[: data.test], order[data.test :]
    if data.fixed_test and held_out == "test":
        rest = generator.permutation(rest)
    if held_out == "validation":
        held, rest = rest[: data.test], rest[data.test :]
    train, train_labels = data.images[rest], data.labels[rest]
    honest = contributors - malicious
    # The coordinator's images come first; contributors share the others.
    shared = np.arange(ROOT_IMAGES, len(train))
    parts = [shared[part] for part in _parts(train_labels[shared], honest, split, generator)]
    parts += [generator.choice(shared, len(shared) // honest, replace=False) for _ in range(malicious)]
    return (
        torch.tensor(train),
        torch.tensor(train_labels),
        torch.tensor(data.images[held]),
        torch.tensor(data.labels[held]),
        [*parts, np.arange(ROOT_IMAGES)],
    )


def _parts(labels: np.ndarray, honest: int, split: Split, generator: np.random.Generator) -> list[np.ndarray]:
    while True:
        parts: list[list[int]] = [[] for _ in range(honest)]
        for label in range(LABELS):
            held = generator.permutation(np.flatnonzero(labels == label))
            shares = np.ones(honest) / honest if split == "iid" else generator.dirichlet([0.1] * honest)
            cuts = (np.cumsum(shares)[:-1] * len(held)).round().astype(int)
            for part, more in zip(parts, np.split(held, cuts), strict=True):
                part.extend(more)
        if split == "lone":
            parts = [[i for i in part if labels[i] != LABELS - 1] for part in parts]
            parts[0] = list(np.flatnonzero(labels == LABELS - 1))
        if min(map(len, parts)) >= FEWEST:
            return [np.array(part) for part in parts]
