"""Deltas on a grid whose step is a power of two."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Integers:
    """A delta that is ``2**exponent`` times ``codes`` exactly.

    Attributes:
        codes: Of any integer dtype, in the shape of the tensor; magnitudes below 2**31.
        exponent: Exponent of the step.
    """

    codes: Tensor
    exponent: int
