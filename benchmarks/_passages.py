"""Text for ``pay.py``: passages of Shakespeare and Wikipedia for a perceptron that predicts the next character.

A row is a passage of ``LENGTH`` characters, each of which is predicted from the ``CONTEXT`` characters before it. Its
loss is the sum of ``LENGTH`` losses. The passages do not overlap and keep the order of their files.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _digits import Perceptron
from torch import Tensor

FILES = ("tinyshakespeare/input.txt", "wikitext2/valid.txt")
ROWS, LENGTH, CONTEXT = 7_000, 16, 6
SYMBOLS = string.ascii_lowercase + " "
"""Every other character counts as one more symbol."""


@dataclass(frozen=True)
class Passages:
    """Rows with one or more labels.

    Attributes:
        inputs: ``[rows, length, inputs]`` float32.
        labels: ``[rows, length]`` int64.
        network: Model that is trained.
        lr: Learning rate.
        ones: ``[rows, length, k]`` int64 indices of the ones in one-hot inputs; None for other inputs.
    """

    inputs: Tensor
    labels: Tensor
    network: Perceptron
    lr: float
    ones: Tensor | None = None


def passages(shared: Path) -> Passages:
    """Read the passages, evenly spaced, with the same number from each file."""
    places = {symbol: place for place, symbol in enumerate(SYMBOLS)}
    symbols, span = len(SYMBOLS) + 1, CONTEXT + LENGTH
    chosen = []
    for name in FILES:
        text = (shared / "data" / name).read_text(encoding="utf-8").lower()
        codes = np.array([places.get(character, len(SYMBOLS)) for character in text])
        cut = codes[: len(codes) // span * span].reshape(-1, span)
        count = ROWS // len(FILES)
        chosen.append(cut[(2 * np.arange(count) + 1) * len(cut) // (2 * count)])
    rows = torch.tensor(np.concatenate(chosen))
    contexts = rows.unfold(1, CONTEXT, 1)[:, :-1]  # [rows, LENGTH, CONTEXT]
    inputs = torch.nn.functional.one_hot(contexts, symbols).flatten(2).float()
    ones = contexts + symbols * torch.arange(CONTEXT)
    return Passages(inputs, rows[:, CONTEXT:], Perceptron(CONTEXT * symbols, 32, symbols), 0.5, ones)
