"""int4: 16 evenly spaced levels, with a searched and refined clip.

Clips are tried from the largest magnitude down to 4% of it, each 0.87 times the last (as in Banner et al. 2019, "Post
training 4-bit quantization", sec. 3, but by trial instead of by an assumed distribution).
"""

from __future__ import annotations

from gym_quant.uniform import UniformCodec


class Int4(UniformCodec):
    """Two weights per byte, the first in the low half. For parameters see ``gym_quant.levels.LevelCodec``."""

    name = "int4"
    for_small = True
    bits = 4
    shrink = tuple(0.87**k for k in range(24))
    refinements = 4
