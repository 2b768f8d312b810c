"""int2: four evenly spaced levels, with a searched and refined clip.

Symmetric levels are ``scale * {-2, -1, 0, 1}``: zero is one of them, so one side has one more level. Asymmetric
levels need not contain zero and lose much less on deltas that are spread evenly around it.
"""

from __future__ import annotations

from gym_quant.codec import Params
from gym_quant.uniform import UniformCodec


class Int2(UniformCodec):
    """Four weights per byte, the first in the lowest bits. For parameters see ``gym_quant.levels.LevelCodec``."""

    name = "int2"
    bits = 2
    coarse = True
    shrink = tuple(0.87**k for k in range(24))
    refinements = 8

    def factor_params(self, group: int) -> Params | None:
        """Return parameters with offsets, since the four levels are lopsided without them."""
        return self.normalise({"group_size": group, "scale_dtype": "bfloat16", "symmetric": False}, ())
