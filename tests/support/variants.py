"""Random deltas of a small model, with a codec of choice for every parameter, and the models merged with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_weights import loaded_variant

Coding = tuple[str, dict[str, Any]] | None
"""A codec and its parameters; None leaves the tensor unchanged."""

Rule = Callable[[str, tuple[int, ...]], Coding]
"""Name and shape of a parameter to its codec."""


def write_random_delta(model: Any, path: Path, rule: Rule, *, seed: int, size: float = 0.05) -> Path:
    """A delta of normal numbers with this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for name, tensor in model_tensors(model).items():
        delta = torch.randn(tensor.shape, generator=generator) * size
        coding = rule(name, tuple(tensor.shape))
        if coding is None:
            continue
        entries.append(DeltaEntry.of(name, delta, coding[0], **coding[1]))
    write_delta(path, entries, BaseSpec.of(model, "base"))
    return path


def load(path: Path, layout: ModelLayout) -> Any:
    """As the store does it, without the store."""
    with DeltaFile.open(path) as delta:
        return loaded_variant(path.stem, delta, layout, delta.sha256())


def merged(model: Any, path: Path) -> Any:
    """A copy of the model with the delta added to its weights."""
    tuned = copy.deepcopy(model)
    with DeltaFile.open(path) as delta:
        apply_delta(tuned, delta)
    return tuned


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference."""
    return float((found - wanted).abs().max())
