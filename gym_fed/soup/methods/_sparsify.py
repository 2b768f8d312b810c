"""Ways to thin out a delta: by magnitude, and by seeded draws that are the same on every machine."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def whole_share(share: float, size: int) -> int:
    """How many of ``size`` elements fit into a share of them; a hair below a whole number counts as that number."""
    return math.floor(round(share * size, 6))


def largest(delta: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` elements of largest magnitude; of equal ones, those of lower index.

    Args:
        delta: Any shape, finite.
        count: From 0 to all of them.

    Returns:
        Bool, of the delta's shape.
    """
    magnitudes = delta.abs().reshape(-1).numpy()
    if count <= 0:
        return torch.zeros(delta.shape, dtype=torch.bool)
    threshold = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    mask = magnitudes > threshold
    equal = np.flatnonzero(magnitudes == threshold)
    mask[equal[: count - int(mask.sum())]] = True
    return torch.from_numpy(mask).reshape(delta.shape)


def trimmed(delta: Tensor, density: float) -> Tensor:
    """The delta with as many of its smallest elements set to zero as fit into ``1 - density`` of them."""
    dropped = whole_share(1.0 - density, delta.numel())
    return torch.where(largest(delta, delta.numel() - dropped), delta, 0.0)


def draws(seed: int, name: str, index: int, shape: torch.Size) -> Tensor:
    """Uniform numbers in [0, 1), float32, that follow from seed, tensor and number of the model alone."""
    text = f"{seed}/{index}/{name}"
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(shape, generator=generator)


def dropped_at_random(delta: Tensor, density: float, uniform: Tensor) -> Tensor:
    """Each element kept with probability ``density`` and then divided by it, else zero (DARE: Yu et al. 2024, eq. 1).

    Its expectation is the delta.
    """
    return torch.where(uniform < density, delta / density, 0.0)
