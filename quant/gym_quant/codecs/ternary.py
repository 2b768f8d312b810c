"""ternary: ``{-scale, 0, scale}`` in 1.6 bits per weight, with the threshold of least squared error.

Li et al. 2016, "Ternary Weight Networks" (arXiv:1605.04711), eq. 5-6: for the set ``I`` of weights that are not zero
the best scale is the mean of ``|delta|`` over ``I``, and the error falls by ``(sum_I |delta|)^2 / |I|``. That paper
approximates the threshold by 0.7 times the mean magnitude; here it is exact: ``I`` is a set of the largest
magnitudes, so all of them are tried, in sorted order. A weight is not zero where ``|delta| > scale / 2``.
Asymmetric: positive and negative weights have separate scales (the levels of Zhu et al. 2016, "Trained Ternary
Quantization", eq. 6), each found in the same way.
"""

from __future__ import annotations

import numpy as np

from gym_quant.bitstream import LARGEST_TRIT_BYTE, Bytes, Floats, pack_trits, packed_trits_width, unpack_trits
from gym_quant.codec import ROW, CodecError
from gym_quant.levels import LevelCodec, Shared, best_split, float64_sums


class Ternary(LevelCodec):
    """Five weights per byte; codes 0 (negative), 1 (zero), 2. For parameters see ``gym_quant.levels.LevelCodec``.

    For a group of more than a million weights the threshold is searched on a sample (``gym_quant.levels.sampled``).
    """

    name = "ternary"
    bits = 2  # in memory; packed, a byte contains five
    coarse = True
    compact = ({"group_size": ROW},)

    @property
    def levels(self) -> int:
        return 3

    def fields(self, symmetric: bool) -> tuple[str, ...]:
        return ("scales",) if symmetric else ("scales", "negative_scales")

    def quantise(self, values: Floats, shared: Shared, symmetric: bool) -> Bytes:
        half = np.float32(0.5)
        up, down = (shared[0], shared[0]) if symmetric else (shared[0], shared[1])
        above, below = (values > half * up) & (up > 0), (values < -half * down) & (down > 0)
        return np.uint8(1) + above.astype(np.uint8) - below.astype(np.uint8)

    def dequantise(self, codes: Bytes, shared: Shared, symmetric: bool) -> Floats:
        digits = codes.astype(np.float32) - np.float32(1.0)
        if symmetric:
            digits *= shared[0]
            return digits
        return np.where(codes == 0, digits * shared[1], digits * shared[0])

    def largest(self, shared: Shared, symmetric: bool) -> Floats:
        return shared[0] if symmetric else np.maximum(shared[0], shared[1])

    def solve(self, values: Floats, weights: Floats | None, symmetric: bool) -> Shared:
        if symmetric:
            return (_best_scale(np.abs(values), weights),)
        return tuple(_best_scale(np.maximum(side, 0.0), weights) for side in (values, -values))

    def pack(self, codes: Bytes) -> Bytes:
        return pack_trits(codes)

    def unpack(self, packed: Bytes, cols: int) -> Bytes:
        return unpack_trits(packed, cols)

    def packed_width(self, cols: int) -> int:
        return packed_trits_width(cols)

    def check_codes(self, packed: Bytes) -> None:
        largest = int(packed.max())
        if largest > LARGEST_TRIT_BYTE:
            raise CodecError(f"byte {largest} does not encode five trits (at most {LARGEST_TRIT_BYTE})")


def _best_scale(magnitudes: Floats, weights: Floats | None) -> Floats:
    """Return the mean of the largest magnitudes whose set maximises ``(sum w |d|)^2 / sum w``: ``[groups]`` float64."""
    mass, moment = float64_sums(magnitudes, weights, descending=True)
    at = best_split(moment**2 / mass)
    return np.asarray((np.take_along_axis(moment, at, 1) / np.take_along_axis(mass, at, 1))[:, 0])
