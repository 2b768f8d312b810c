"""The share of each update in a soup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.delta.file import DeltaFile

_PARTS_BLOCK = 1 << 21


def parts(updates: Sequence[DeltaFile], soup: DeltaFile) -> list[float]:
    """Return the least-squares coefficients ``c`` for which ``sum_i c_i update_i`` is closest to the soup.

    They equal the rule's own weights if it weights whole updates and the soup is written exactly, and the best linear
    approximation otherwise. Linearly dependent updates share the weight of their common part. For display only: the
    last bits depend on the machine.
    """
    rows = [*updates, soup]
    products = np.zeros((len(rows), len(rows)))
    for name in sorted({name for file in rows for name in file.names}):
        shape = next(file.record(name).shape for file in rows if name in file)
        height, width = as_matrix(shape)
        step = max(1, _PARTS_BLOCK // (width * len(rows)))
        for start in range(0, height, step):
            stop = min(height, start + step)
            block = (
                torch.stack([_dense_rows(file, name, start, stop, width) for file in rows]).double().numpy()
            )
            products += block @ block.T
    coefficients, *_ = np.linalg.lstsq(products[:-1, :-1], products[:-1, -1], rcond=1e-9)
    return [float(value) for value in coefficients]


def _dense_rows(file: DeltaFile, name: str, start: int, stop: int, width: int) -> Tensor:
    if name not in file:
        return torch.zeros((stop - start) * width)
    return file.decode_rows(name, start, stop).reshape(-1)
