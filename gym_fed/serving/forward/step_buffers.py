"""The tensors that the own forward writes a step's activations to."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from gym_fed.serving.forward.recorded_layers import Recording


class StepBuffers:
    """The tensors of a step, kept for the next one of as many rows or fewer."""

    def __init__(self, hidden: int, attended: int, qkv: int, inner: int) -> None:
        self._widths = {"hidden": hidden, "normed": hidden, "term": hidden, "qkv": qkv, "attended": attended}
        self._widths |= {"gate_up": 2 * inner, "gated": inner}
        self._inner, self._rows = inner, 0
        self._held: dict[str, Tensor] = {}
        self._views: dict[int, SimpleNamespace] = {}

    def clear(self) -> None:
        """Forget all, recordings included, which have the addresses of weights."""
        self._rows = 0
        self._held.clear()
        self._views.clear()

    def of(self, rows: int) -> SimpleNamespace:
        """Tensors of so many rows by name, and their ``recording``; their contents are of the step before."""
        if rows > self._rows:
            self._rows = max(8, 1 << (rows - 1).bit_length())
            self._held = {name: torch.empty(self._rows, width) for name, width in self._widths.items()}
            self._views.clear()
        if rows not in self._views:
            views = {name: held[:rows] for name, held in self._held.items()}
            gate_up = views["gate_up"]
            views["gate"], views["up"] = gate_up[:, : self._inner], gate_up[:, self._inner :]
            self._views[rows] = SimpleNamespace(**views, recording=Recording())
        return self._views[rows]
