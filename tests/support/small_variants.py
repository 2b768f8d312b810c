"""Deltas of two small tensors, their base, and signed variants of them, for tests of the variant store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward.variant_weights import LoadedVariant
from gym_fed.serving.store.signing import sign_variant
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant

SHAPES = {"layer.weight": (8, 16), "norm.weight": (16,)}


def small_base(digit: str = "a") -> BaseSpec:
    """A base of two tensors."""
    return BaseSpec("small", "sha256:" + digit * 64, dict(SHAPES))


def small_delta(path: Path, seed: int = 0, base: BaseSpec | None = None) -> Path:
    """A `.gymdelta` of that base: a matrix of sign bits and a dense vector."""
    generator = torch.Generator().manual_seed(seed)
    entries = [
        DeltaEntry.of(
            name, torch.randn(shape, generator=generator), "bitdelta" if len(shape) == 2 else "dense"
        )
        for name, shape in SHAPES.items()
    ]
    write_delta(path, entries, base or small_base())
    return path


def signed_small_delta(
    path: Path, key: SigningKey, name: str, *, revision: int = 1, seed: int = 0, base: BaseSpec | None = None
) -> tuple[Path, SignedVariant]:
    """A delta and its signed manifest."""
    small_delta(path, seed, base)
    return path, sign_variant(path, key, name=name, revision=revision)


def fake_loader(name: str, delta: DeltaFile, layout: Any, sha256: str) -> LoadedVariant:
    """As ``loaded_variant``, without a model: takes as much memory as the file has bytes."""
    return LoadedVariant(name, sha256, {}, delta.size_bytes)
