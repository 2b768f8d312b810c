"""Error compensation: spread each column's rounding error over the columns not rounded yet (GPTQ).

Frantar et al. 2022, "GPTQ", eq. 2-4 with the Cholesky form of sec. 3.3: for inputs with second moments ``M`` the error
of a layer's output is ``tr(E M E')``; after column ``j`` was rounded, the best change of the later columns is
``-e_j U_jk / U_jj`` with ``U'U`` the inverse of ``M``. Columns are processed in order, and a tenth of ``M``'s mean
diagonal is added to it: GPTQ's hundredth gives the same output error here, but keeps less of a fine-tune's gain.

LAPACK does the factorisation, so a code on the edge between two levels may differ between machines. Decoding is the
same on all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gym_quant.bitstream import Bytes, Floats
from gym_quant.codec import CodecError

_DAMPING = 0.1
_BLOCK = 128

Rounded = Callable[[Floats, int], tuple[Bytes, Floats]]
"""A function from a column's values ``[rows, 1]`` float32 and its number to codes and their decoded values."""


def compensated_codes(values: Floats, moments: Floats, rounded: Rounded) -> Bytes:
    """Quantise ``values`` to codes ``[rows, cols]`` with a small output error of the layer.

    Args:
        values: ``[rows, cols]`` float32.
        moments: ``[cols, cols]`` float64, symmetric; second moments of the layer's inputs.
        rounded: Rounds one column.

    Raises:
        CodecError: If the moments are not positive semidefinite.
    """
    upper = _factor(moments)
    rows, cols = values.shape
    left = values.astype(np.float64)
    codes = np.empty((rows, cols), dtype=np.uint8)
    for start in range(0, cols, _BLOCK):
        stop = min(cols, start + _BLOCK)
        errors = np.empty((rows, stop - start))
        for j in range(start, stop):
            column = left[:, j : j + 1]
            codes[:, j : j + 1], decoded = rounded(column.astype(np.float32), j)
            error = (column - decoded) / upper[j, j]
            left[:, j:stop] -= error * upper[j, j:stop]
            errors[:, j - start] = error[:, 0]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes


def _factor(moments: Floats) -> Floats:
    """Return the upper Cholesky factor of the inverse of the damped moments."""
    matrix = torch.from_numpy(moments)
    mean = float(matrix.diagonal().mean())
    damped = matrix + (_DAMPING * mean if mean > 0.0 else 1.0) * torch.eye(len(matrix), dtype=torch.float64)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise CodecError("importance is not a matrix of second moments: it is not positive semidefinite")
    factor: Floats = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).numpy()
    return factor
