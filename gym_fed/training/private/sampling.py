"""Poisson sampling from the operating system's randomness: each example is drawn independently.

The accountant's amplification by sampling holds for this and for nothing else: not for shuffled batches of a fixed
size, and not for a generator whose seed somebody knows, who would then know who was in which batch.
"""

from __future__ import annotations

import os

import numpy as np

_WORD_BYTES = 8


def poisson_sample(num_examples: int, expected: int) -> list[int]:
    """Return the indices of one batch, possibly none, each drawn with probability ``expected / num_examples``.

    64 bits decide on an example; the probability is rounded down to a multiple of 2^-64.
    """
    if expected >= num_examples:
        return list(range(num_examples))
    threshold = (expected << 64) // num_examples
    words = np.frombuffer(os.urandom(_WORD_BYTES * num_examples), dtype="<u8")
    return [int(index) for index in np.flatnonzero(words < np.uint64(threshold))]
