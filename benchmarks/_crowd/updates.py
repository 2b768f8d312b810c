"""Updates that are prepared before the run, and the ways in which malicious members spoil them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta

_STEP = 1e-3
_FLIPPED = 0.01
"""Fraction of the sign bits that differ between two updates from the same template."""
_INFLATION = 100.0
_NO_VERSION = b"sha256:" + 64 * b"0"
"""Placeholder digest in the header of a template, which is replaced by a version's digest."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Updates:
    """A pool of templates from which distinct one-bit updates are made for a given version.

    Args:
        base_model: Name or folder of the base model.
        size: Number of templates, each of which is a common direction plus equally large individual noise.
    """

    def __init__(self, base_model: str, size: int) -> None:
        self._templates = [self._template(base_model, seed) for seed in range(size)]
        header = int.from_bytes(self._templates[0][:8].tobytes(), "little")
        self._layout = json.loads(self._templates[0][8 : 8 + header].tobytes())
        self._start = 8 + header
        digests = [bytes(template[: self._start]).count(_NO_VERSION) for template in self._templates]
        if set(digests) != {1}:
            raise RuntimeError(f"the header names the base {digests} times; it must be patched once")

    @property
    def size_bytes(self) -> int:
        return len(self._templates[0])

    def make(self, version: str, draw: random.Random, spoil: str = "") -> bytes:
        """Return an update of a version.

        Args:
            version: Digest of the version, as in the task.
            draw: Random generator for the template and the flipped bits.
            spoil: Name in ``SPOILS``; empty for an honest update.
        """
        delta = draw.choice(self._templates).copy()
        at = bytes(delta[: self._start]).index(_NO_VERSION)
        delta[at : at + len(version)] = np.frombuffer(version.encode(), np.uint8)
        signs = self._section(delta, "u8")
        generator = np.random.default_rng(draw.getrandbits(64))
        places = generator.integers(0, len(signs), max(1, int(8 * _FLIPPED * len(signs))))
        signs[places] ^= np.uint8(1) << generator.integers(0, 8, len(places), np.uint8)
        if spoil:
            SPOILS[spoil](signs, self._section(delta, "f32").view(np.float32))
        return delta.tobytes()

    def _section(self, delta: Bytes, name: str) -> Bytes:
        first, last = self._layout[name]["data_offsets"]
        return delta[self._start + first : self._start + last]

    def _template(self, base_model: str, seed: int) -> Bytes:
        base = model_tensors(load_model(base_model).model)
        spec = BaseSpec(base_model, _NO_VERSION.decode(), {name: tuple(t.shape) for name, t in base.items()})
        common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + seed)
        tuned = {
            name: t + _STEP * (torch.randn(t.shape, generator=common) + torch.randn(t.shape, generator=own))
            for name, t in base.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "template.gymdelta"
            encode_delta(tuned, base, CodecPolicy(error_feedback=False), path, spec)
            return np.frombuffer(path.read_bytes(), np.uint8)


def _flip(signs: Bytes, scales: Any) -> None:
    signs ^= 0xFF


def _inflate(signs: Bytes, scales: Any) -> None:
    scales *= _INFLATION


def _spoil_scale(signs: Bytes, scales: Any) -> None:
    scales[0] = np.nan


SPOILS: dict[str, Callable[[Bytes, Any], None]] = {
    "flipped": _flip,
    "inflated": _inflate,
    "not-finite": _spoil_scale,
}
"""Functions that spoil a valid file, by name: all signs, all scales, or one scale."""
