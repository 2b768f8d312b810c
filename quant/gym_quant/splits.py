"""Best splits of sorted values: what makes two- and three-level quantisation exact instead of iterative."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gym_quant.bitstream import Floats


def float64_sums(values: Floats, weights: Floats | None, descending: bool) -> tuple[Floats, Floats]:
    """Running mass and running moment of each row's values in sorted order, both ``[groups, n]`` float64.

    Entry ``i`` holds the sums of the first ``i + 1`` values: of their weights (their number without weights), and
    of weight times value.
    """
    order = np.argsort(values, axis=1, kind="stable")
    if descending:
        order = order[:, ::-1]
    moments = np.take_along_axis(values, order, 1).astype(np.float64)
    if weights is None:
        mass = np.broadcast_to(np.arange(1.0, values.shape[1] + 1.0), values.shape)
    else:
        sorted_weights = np.take_along_axis(weights, order, 1).astype(np.float64)
        moments *= sorted_weights
        mass = sorted_weights.cumsum(axis=1)
    return mass, moments.cumsum(axis=1, out=moments)


def best_split(gain: Floats) -> npt.NDArray[Any]:
    """Index ``[groups, 1]`` of each row's largest gain, the first of equals."""
    return np.asarray(gain.argmax(axis=1)[:, None])
