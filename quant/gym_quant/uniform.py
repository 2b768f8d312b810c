"""Evenly spaced levels: the grid of int8, int4 and int2, and the search for the step with the least error.

Symmetric: ``value = scale * (code - 2**(bits - 1))``; the code ``2**(bits - 1)`` decodes to exactly zero, and zero is
always encoded as it. Asymmetric: ``value = scale * code + offset``, with a zero point that need not be an integer
of steps. Both are computed in float32, each operation rounded separately. Codes are ``round((value - offset) / scale)``
to the nearest (ties to even), clipped to ``0 .. 2**bits - 1``.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_quant.bitstream import Bytes, Floats
from gym_quant.levels import LevelCodec, Shared

_CHUNK = 1 << 16


class UniformCodec(LevelCodec):
    """``2**bits`` evenly spaced levels; shared fields ``scales`` and, if asymmetric, ``offsets``.

    ``shrink`` lists the clips to try, as shares of the group's largest magnitude (asymmetric: of its range about its
    middle). The one with the least squared error is then refined: with its codes fixed, scale and offset are fitted by
    least squares, codes are chosen again, and so on while the error falls (Lloyd's iteration on a uniform grid).
    """

    shrink: ClassVar[tuple[float, ...]] = (1.0,)
    refinements: ClassVar[int] = 0

    def fields(self, symmetric: bool) -> tuple[str, ...]:
        return ("scales",) if symmetric else ("scales", "offsets")

    def quantise(self, values: Floats, shared: Shared, symmetric: bool) -> Bytes:
        return self._levels(values, shared, symmetric).astype(np.uint8)

    def dequantise(self, codes: Bytes, shared: Shared, symmetric: bool) -> Floats:
        if symmetric:
            return (codes.astype(np.float32) - np.float32(1 << (self.bits - 1))) * shared[0]
        grid = codes.astype(np.float32) * shared[0]
        grid += shared[1]
        return grid

    def solve(self, values: Floats, weights: Floats | None, symmetric: bool) -> Shared:
        top = (1 << self.bits) - 1
        low, high = (v.astype(np.float64) for v in (values.min(axis=1), values.max(axis=1)))
        if symmetric:
            reach, middle, steps = np.maximum(-low, high), np.zeros_like(low), top // 2
        else:
            reach, middle, steps = (high - low) / 2, (high + low) / 2, top
        if self.shrink == (1.0,) and not self.refinements:
            return (reach / steps,) if symmetric else (2 * reach / steps, low)
        best = np.full(low.shape, np.inf)
        scale, offset = np.zeros_like(low), np.zeros_like(low)

        def offer(new_scale: Floats, new_offset: Floats) -> Floats:
            error = self._error(values, weights, new_scale, new_offset, symmetric)
            better = error < best
            for current, new in ((best, error), (scale, new_scale), (offset, new_offset)):
                current[better] = new[better]
            return better

        for share in self.shrink:
            if symmetric:
                offer(reach * share / steps, middle)
            else:
                offer(2 * reach * share / steps, middle - reach * share)
        for _ in range(self.refinements):
            if not offer(*self._fitted(values, weights, scale, offset, symmetric)).any():
                break
        return (scale,) if symmetric else (scale, offset)

    def _levels(self, values: Floats, shared: Shared, symmetric: bool) -> Floats:
        """Return the codes, still in float32."""
        scale = shared[0]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            steps = (values if symmetric else values - shared[1]) / scale
        if not bool(np.all(scale)):
            np.copyto(steps, 0.0, where=np.broadcast_to(scale == 0, steps.shape))
        np.rint(steps, out=steps)
        if symmetric:
            steps += np.float32(1 << (self.bits - 1))
        return np.clip(steps, 0, (1 << self.bits) - 1, out=steps)

    def _error(
        self, values: Floats, weights: Floats | None, scale: Floats, offset: Floats, symmetric: bool
    ) -> Floats:
        """Return each group's weighted squared error in float64, with the scale and the offset rounded to float32."""
        shared = tuple(v.astype(np.float32)[:, None] for v in ((scale,) if symmetric else (scale, offset)))
        total = np.zeros(values.shape[0])
        for at in _chunks(values):
            part = values[:, at]
            lost = self.dequantise(self._levels(part, shared, symmetric), shared, symmetric)
            lost -= part
            exact = lost.astype(np.float64)  # float32 squares overflow or tie
            np.square(exact, out=exact)
            if weights is not None:
                exact *= weights[:, at]
            total += exact.sum(axis=1)
        return total

    def _fitted(
        self, values: Floats, weights: Floats | None, scale: Floats, offset: Floats, symmetric: bool
    ) -> tuple[Floats, Floats]:
        """Fit scale and offset by least squares of values on codes."""
        shared = tuple(v.astype(np.float32)[:, None] for v in ((scale,) if symmetric else (scale, offset)))
        sums = np.zeros((5, values.shape[0]))
        for at in _chunks(values):
            x = values[:, at].astype(np.float64)
            q = self._levels(values[:, at], shared, symmetric).astype(np.float64)
            if symmetric:
                q -= 1 << (self.bits - 1)
            w = np.ones_like(x) if weights is None else weights[:, at].astype(np.float64)
            wq = w * q
            sums += np.stack([part.sum(axis=1) for part in (w, wq, w * x, wq * q, wq * x)])
        n, sq, sx, sqq, sqx = sums
        if symmetric:
            return np.divide(sqx, sqq, out=scale.copy(), where=sqq > 0), offset
        spread = n * sqq - sq * sq
        usable = spread > 1e-9 * n * sqq
        slope = np.divide(n * sqx - sq * sx, spread, out=scale.copy(), where=usable)
        slope = np.where(slope > 0, slope, scale)
        return slope, np.where(usable, (sx - slope * sq) / n, offset)


def _chunks(values: Floats) -> list[slice]:
    """Yield blocks of columns that fit into a core's cache."""
    step = max(1, _CHUNK // values.shape[0])
    return [slice(start, start + step) for start in range(0, values.shape[1], step)]
