"""bfloat16 weights, multiplied by bfloat16 activations if the processor supports such products."""

from __future__ import annotations

from gym_quant.kernels.linear_reference import BFLOAT16
from gym_quant.tiled_linear import TiledLinear


class Bfloat16Linear(TiledLinear):
    """Two bytes per weight. With AVX-512 BF16, activations are bfloat16; otherwise float32.

    Products in bfloat16 are 1.8 times as fast with eight rows. On SmolLM2, they raise the divergence from the float32
    model from 3e-5 to 1.2e-4. With vector instructions, a row's result is the same alone, in a batch and in a prompt:
    rounding only for many rows would change answers with the number of users.
    """

    format = "bfloat16"
    code = BFLOAT16
    default_group = None
    reach = 1.0
    many_rows = 17
