"""int8: 256 evenly spaced levels up to the largest magnitude, without a clip search.

Symmetric: ``scale = max |delta| / 127`` and codes 1 to 255 (value ``scale * (code - 128)``), as in Dettmers et al.
2022, "LLM.int8()", eq. 3. Asymmetric: ``scale = (max - min) / 255``, ``offset = min``.
"""

from __future__ import annotations

from gym_quant.codec import ROW
from gym_quant.uniform import UniformCodec


class Int8(UniformCodec):
    """One byte per weight. For parameters see ``gym_quant.levels.LevelCodec``, for levels ``gym_quant.uniform``."""

    name = "int8"
    for_small = True
    bits = 8
    compact = ({"group_size": ROW},)
