"""A federation on scikit-learn's digits: data split by label, and contributors that all train in one batch.

All contributors of all seeds are one batch of small perceptrons (64-64-10), so that a round takes milliseconds. As in
ByzFL, the honest contributors hold all of the training data; each liar has a sample of everything, which is more than a
real one would know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

SHAPES: dict[str, tuple[int, ...]] = {
    "hidden.weight": (64, 64),
    "hidden.bias": (64,),
    "output.weight": (64, 10),
    "output.bias": (10,),
}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
DIMENSION = sum(SIZES)
LABELS = 10
NUM_TEST = 360
FEWEST = 8
"""Images that every honest contributor has at least; splits with fewer are drawn again."""

Split = Literal["iid", "dirichlet", "lone"]
"""All alike; Dirichlet(0.1) over the labels; that, and the first contributor alone holds label 9 and nothing else."""


@dataclass(frozen=True)
class Schedule:
    """How the honest train; the same for all rules and attacks.

    Attributes:
        rounds: Rounds.
        steps: Local steps of SGD a round.
        batch: Images a step.
        lr: Learning rate.
        momentum: Of the local SGD, anew every round.
    """

    rounds: int = 80
    steps: int = 10
    batch: int = 32
    lr: float = 0.3
    momentum: float = 0.9


class Digits:
    """The data of a federation, once for each seed; S seeds are trained side by side.

    Args:
        seeds: Of split, order and first model.
        contributors: n, liars included.
        liars: f; they are the last of the n.
        split: How honest contributors differ.
    """

    def __init__(self, seeds: Sequence[int], contributors: int, liars: int, split: Split) -> None:
        self.seeds, self.contributors, self.liars = tuple(seeds), contributors, liars
        drawn = [_draw(seed, contributors, liars, split) for seed in seeds]
        self.images, self.labels, self.test_images, self.test_labels = (
            torch.stack([one[part] for one in drawn]) for part in range(4)
        )
        """``[S, images, 64]`` float32 and ``[S, images]`` int64, training and test part."""
        self.holdings = [one[4] for one in drawn]
        """For every seed and contributor, which of the training images it holds."""
        longest = max(len(held) for one in self.holdings for held in one)
        self._counts = torch.tensor([[len(held) for held in one] for one in self.holdings])
        self._index = torch.tensor(
            np.stack([[np.resize(held, longest) for held in one] for one in self.holdings])
        )

    @property
    def honest(self) -> int:
        return self.contributors - self.liars

    def counts(self, seed_index: int) -> np.ndarray:
        """``[honest, 10]`` images of each label."""
        labels = self.labels[seed_index].numpy()
        return np.stack(
            [np.bincount(labels[h], minlength=LABELS) for h in self.holdings[seed_index][: self.honest]]
        )

    def first_model(self) -> Tensor:
        """``[S, d]`` weights, after He."""
        models = []
        for seed in self.seeds:
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.randn(SIZES[0], generator=generator) * math.sqrt(2 / 64)
            output = torch.randn(SIZES[2], generator=generator) * math.sqrt(1 / 64)
            models.append(torch.cat([hidden, torch.zeros(SIZES[1]), output, torch.zeros(SIZES[3])]))
        return torch.stack(models)

    def train(
        self,
        model: Tensor,
        schedule: Schedule,
        who: range,
        generator: torch.Generator,
        poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """``[S, len(who), d]``: what a round of local training adds to ``model`` ``[S, d]``.

        Args:
            poison: Changes a batch of images ``[b, m, 64]`` and labels ``[b, m]`` before it is learnt.
        """
        seeds, number = len(self.seeds), len(who)
        start = model[:, None].expand(seeds, number, DIMENSION).reshape(-1, DIMENSION)
        weights, velocity = start.clone(), torch.zeros_like(start)
        counts, index = self._counts[:, who.start : who.stop], self._index[:, who.start : who.stop]
        rows = torch.arange(seeds)[:, None, None]
        for _ in range(schedule.steps):
            drawn = torch.rand(seeds, number, schedule.batch, generator=generator) * counts[..., None]
            chosen = index.gather(2, drawn.long())
            images = self.images[rows, chosen].view(seeds * number, -1, 64)
            labels = self.labels[rows, chosen].view(seeds * number, -1)
            if poison is not None:
                images, labels = poison(images, labels)
            velocity.mul_(schedule.momentum).add_(gradient(weights, images, labels))
            weights.sub_(velocity, alpha=schedule.lr)
        return (weights - start).view(seeds, number, DIMENSION)

    def correct(self, model: Tensor) -> Tensor:
        """``[S, images]`` bool, of the test part."""
        return logits(model, self.test_images).argmax(-1) == self.test_labels


def logits(model: Tensor, images: Tensor) -> Tensor:
    """``[b, m, 10]`` of ``[b, d]`` models and ``[b, m, 64]`` images."""
    hidden, hidden_bias, output, output_bias = unpacked(model)
    inner = torch.baddbmm(hidden_bias[:, None], images, hidden).clamp_min(0.0)
    return torch.baddbmm(output_bias[:, None], inner, output)


def loss(model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """``[b]`` mean cross entropy; infinite where it is not a number."""
    found = torch.nn.functional.cross_entropy(logits(model, images).transpose(1, 2), labels, reduction="none")
    return torch.nan_to_num(found.mean(-1), nan=math.inf)


def gradient(model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """``[b, d]`` gradient of the mean cross entropy, written out: autograd would take longer than the arithmetic."""
    hidden, hidden_bias, output, output_bias = unpacked(model)
    before = torch.baddbmm(hidden_bias[:, None], images, hidden)
    inner = before.clamp_min(0.0)
    slope = torch.baddbmm(output_bias[:, None], inner, output).softmax(-1)
    slope.scatter_add_(2, labels[..., None], -torch.ones_like(slope[..., :1]))
    slope /= images.shape[1]
    back = torch.bmm(slope, output.transpose(1, 2)).mul_(before > 0.0)
    parts = (
        torch.bmm(images.transpose(1, 2), back),
        back.sum(1),
        torch.bmm(inner.transpose(1, 2), slope),
        slope.sum(1),
    )
    return torch.cat([part.flatten(1) for part in parts], 1)


def unpacked(flat: Tensor) -> list[Tensor]:
    """``[..., d]`` as the model's tensors, in the order of ``SHAPES``."""
    parts = flat.split(SIZES, dim=-1)
    return [
        part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, SHAPES.values(), strict=True)
    ]


def signs(updates: Tensor) -> Tensor:
    """``[..., d]`` as codec ``bitdelta`` with one scale a tensor decodes it: the sign times the mean magnitude."""
    parts = updates.split(SIZES, dim=-1)
    return torch.cat([torch.where(p >= 0, 1.0, -1.0) * p.abs().mean(-1, keepdim=True) for p in parts], dim=-1)


def _draw(
    seed: int, contributors: int, liars: int, split: Split
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[np.ndarray]]:
    images, labels = load_digits(return_X_y=True)
    generator = np.random.default_rng(1000 + seed)
    order = generator.permutation(len(images))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order]
    train, train_labels = images[NUM_TEST:], labels[NUM_TEST:]
    honest = contributors - liars
    parts = _parts(train_labels, honest, split, generator)
    parts += [generator.choice(len(train), len(train) // honest, replace=False) for _ in range(liars)]
    return (
        torch.tensor(train),
        torch.tensor(train_labels),
        torch.tensor(images[:NUM_TEST]),
        torch.tensor(labels[:NUM_TEST]),
        parts,
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
