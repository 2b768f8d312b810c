"""How far a value in a GGUF file may be from the one that it was made of, by the type of its block.

A block's error is at most a share of its largest magnitude; blocks of the K types have parts with a scale each, and a
second share of the largest one of the part. Each share follows from the layout (``ggml-quants.c``): the widest step
between two levels, and the rounding of the scales. The scales are float16, whose smallest numbers are
``2^-24`` apart: half of that, times the highest multiple of a scale, is allowed in any block.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF = 2.0**-11
"""Rounding of a float16, relative to it."""
_SMALLEST = 2.0**-25
"""Rounding of the smallest float16."""
_SIX_BITS = 0.5 / 63
"""Rounding of a scale of 6 bits, relative to the largest one of its block."""


@dataclass(frozen=True)
class Rounding:
    """What one type may lose.

    Attributes:
        block: Values with one float16.
        share: Largest error, relative to the largest magnitude of the block.
        least: Error that is allowed in any block.
        scale: How far the tensor as a whole may be from one times the source: of the least squares' factor. Rounding
            to levels leaves it near 1 (Q5_1 of SmolLM2's matrices is 1.9% off); a tensor that was multiplied keeps
            within ``share`` where levels are few.
        part: Values with a scale of their own; 0: the block.
        share_of_part: The error's further share, of the largest magnitude of the part.
    """

    block: int
    share: float
    least: float
    scale: float
    part: int = 0
    share_of_part: float = 0.0

    @property
    def most(self) -> float:
        """Of any value, relative to the largest of its block."""
        return self.share + self.share_of_part


def _one_step(block: int, levels: int, scale: float) -> Rounding:
    """Levels from ``-levels`` to ``levels - 1``: the far end is a whole step beyond the last one."""
    return Rounding(block, 1 / levels + _HALF, levels * _SMALLEST, scale)


def _with_minima(most: int, scale: float) -> Rounding:
    """Levels from 0 to ``most`` over at most twice the largest value, above a minimum; both scales in 6 bits.

    The search may give up half a step at an end for less loss over the block, so a whole step is allowed.
    """
    return Rounding(256, 3 * (_SIX_BITS + _HALF), 63 * (most + 1) * _SMALLEST, scale, 32, 2 / most)


ROUNDINGS = {
    "F32": Rounding(1, 0.0, 0.0, 0.0),
    "F16": Rounding(1, _HALF, _SMALLEST, _HALF),
    "BF16": Rounding(1, 2.0**-8, 2.0**-134, 2.0**-8),
    "Q8_0": Rounding(32, 0.5 / 127 + _HALF, 127 * _SMALLEST, 1e-3),
    "Q6_K": Rounding(256, 0.5 / 128 + _HALF, 128 * 32 * _SMALLEST, 5e-3, 16, 1 / 31),
    "Q5_K": _with_minima(31, 2e-2),
    "Q4_K": _with_minima(15, 3e-2),
    "Q5_1": Rounding(32, 1 / 31 + 3 * _HALF, 32 * _SMALLEST, 5e-2),
    "Q5_0": _one_step(32, 16, 1e-2),
    "Q4_0": _one_step(32, 8, 3e-2),
}
"""By the type's name; the types that are written."""
