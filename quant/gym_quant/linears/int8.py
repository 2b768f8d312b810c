"""8-bit weights with a scale per group of columns, and 16-bit activations."""

from __future__ import annotations

from gym_quant.kernels.linear_reference import INT8
from gym_quant.tiled_linear import TiledLinear


class Int8Linear(TiledLinear):
    """Symmetric, 8.5 bits per weight in groups of 32, with a float16 scale each.

    Of a few scales, the one with the smallest squared error is used. Activations have a step for every group; their 16
    bits cost the same as 8 up to two rows.
    """

    format = "int8"
    code = INT8
    default_group = 32
    reach = 127.0
    many_rows = 64
