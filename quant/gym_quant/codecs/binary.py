"""binary: two levels per group.

Symmetric: ``value = +-scale`` with ``scale = mean |delta|`` (weighted where importance is given), the least squared
error for given signs; the bit is 1 where delta >= 0 (Rastegari et al. 2016, "XNOR-Net", eq. 6, as in BitDelta).
Asymmetric: ``value = offset +- scale``: the two centroids of the group, the split with the least squared error of all
splits of the sorted values (exact 2-means in one dimension); the bit is 1 where delta >= offset.
"""

from __future__ import annotations

import numpy as np
import torch

from gym_quant.bitstream import Bytes, Floats
from gym_quant.codec import VALUES, MergeForm, Params, Payload, Shape, as_matrix, group_size
from gym_quant.kernels import SignMatrix
from gym_quant.levels import LevelCodec, Shared, best_split, float64_sums, is_symmetric


class Binary(LevelCodec):
    """Eight weights per byte, packed as in ``gym_quant.packing``. For parameters see ``gym_quant.levels.LevelCodec``.

    For a group of more than a million weights, the split is searched on a sample (``gym_quant.levels.sampled``).
    """

    name = "binary"
    bits = 1
    coarse = True

    def fields(self, symmetric: bool) -> tuple[str, ...]:
        return ("scales",) if symmetric else ("scales", "offsets")

    def quantise(self, values: Floats, shared: Shared, symmetric: bool) -> Bytes:
        return (values >= (0.0 if symmetric else shared[1])).astype(np.uint8)

    def dequantise(self, codes: Bytes, shared: Shared, symmetric: bool) -> Floats:
        grid = (codes.astype(np.float32) * np.float32(2.0) - np.float32(1.0)) * shared[0]
        if not symmetric:
            grid += shared[1]
        return grid

    def merge_form(self, shape: Shape, params: Params) -> MergeForm:
        return MergeForm("signs", group_size(params), since=2) if is_symmetric(params) else VALUES

    def signs(self, payload: Payload, shape: Shape, params: Params) -> SignMatrix | None:
        """Return sign bits and scales in the layout of ``bitdelta``; None for asymmetric scales."""
        if not is_symmetric(params):
            return None
        scales = payload["scales"].to(torch.float32)
        return SignMatrix(payload["codes"], scales, as_matrix(shape)[1], group_size(params))

    def solve(self, values: Floats, weights: Floats | None, symmetric: bool) -> Shared:
        if symmetric:
            magnitudes = np.abs(values)
            if weights is None:
                return (magnitudes.mean(axis=1, dtype=np.float64),)
            total = weights.sum(axis=1, dtype=np.float64)
            return ((magnitudes.astype(np.float64) * weights).sum(axis=1) / total,)
        mass, moment = float64_sums(values, weights, descending=False)
        rest_mass, rest = mass[:, -1:] - mass, moment[:, -1:] - moment
        gain = moment**2 / mass + np.divide(rest**2, rest_mass, out=np.zeros_like(rest), where=rest_mass > 0)
        at = best_split(gain)
        low = np.take_along_axis(moment / mass, at, 1)[:, 0]
        tail_mass, tail = (np.take_along_axis(part, at, 1)[:, 0] for part in (rest_mass, rest))
        high = np.divide(tail, tail_mass, out=low.copy(), where=tail_mass > 0)
        return np.maximum(high - low, 0.0) / 2, (low + high) / 2
