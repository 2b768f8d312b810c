"""Deltas on a grid whose step is a power of two."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Integers:
    """A delta that equals ``2**exponent * codes``.

    Attributes:
        codes: Integers of any dtype, in the tensor's shape; magnitudes below 2**31.
        exponent: The step's exponent.
    """

    codes: Tensor
    exponent: int
