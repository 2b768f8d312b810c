"""Text for ``pay.py``: passages of Shakespeare and Wikipedia, whose next character a perceptron predicts.

A row is a passage of ``LENGTH`` characters that are predicted, each from the ``CONTEXT`` characters before it, so its
loss is the sum of ``LENGTH`` losses. The passages do not overlap, and are in the order of their files.
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
        network: What learns them.
        lr: Learning rate.
        ones: ``[rows, length, k]`` int64: where one-hot inputs are 1; None for other inputs.
    """

    inputs: Tensor
    labels: Tensor
    network: Perceptron
    lr: float
    ones: Tensor | None = None


def passages(shared: Path) -> Passages:
    """Read the passages, as many of each file, evenly spaced."""
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
