"""Near-duplicate search by MinHash and locality-sensitive hashing: texts whose sets of shingles overlap.

Broder 1997, "On the resemblance and containment of documents": the share of hash functions under which two sets have
the same minimum estimates their Jaccard similarity. Banding as in Leskovec, Rajaraman and Ullman, "Mining of Massive
Datasets", section 3.4: texts are compared only when all r minima of one of b bands agree, which two texts of
similarity s do with probability 1 - (1 - s^r)^b.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_HASHES = 128
SHINGLE_CHARACTERS = 5
_RECALL = 0.99
_BLOCK = 256  # shingles at once: their hashes (256 KiB) stay in the core's cache
_UINT = NDArray[np.uint64]


class NearDuplicates:
    """Texts seen so far; the first of each group of near-duplicates is the one that is kept.

    Holds 512 bytes of minima and the bands' keys for each text, never the texts.

    Args:
        threshold: Estimated Jaccard similarity of the texts' shingles from which on one is a duplicate. The estimate's
            standard deviation is at most 0.044.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._rows_per_band = rows_per_band(threshold)
        self._minima: list[NDArray[np.uint32]] = []
        self._buckets: list[dict[bytes, list[int]]] = [{} for _ in range(NUM_HASHES // self._rows_per_band)]

    def find_or_add(self, text: str) -> tuple[int, float] | None:
        """The earlier text that this one nearly repeats, counted from 0 among those added, and the similarity.

        None when there is none; the text is added then.
        """
        minima = signature(text)
        keys = [
            minima[at * self._rows_per_band : (at + 1) * self._rows_per_band].tobytes()
            for at in range(len(self._buckets))
        ]
        candidates = {
            index for key, bucket in zip(keys, self._buckets, strict=True) for index in bucket.get(key, ())
        }
        best = max(((self._similarity(index, minima), -index) for index in candidates), default=(0.0, 0))
        if best[0] >= self.threshold:
            return -best[1], best[0]
        for key, bucket in zip(keys, self._buckets, strict=True):
            bucket.setdefault(key, []).append(len(self._minima))
        self._minima.append(minima)
        return None

    def _similarity(self, index: int, minima: NDArray[np.uint32]) -> float:
        return float((self._minima[index] == minima).mean())


def rows_per_band(threshold: float) -> int:
    """The most rows a band may have for a pair at the threshold to be compared with 99% probability."""
    for rows in range(NUM_HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (NUM_HASHES // rows) >= _RECALL:
            return rows
    return 1


def signature(text: str) -> NDArray[np.uint32]:
    """Minima of the text's shingles under every hash function, ``[128] uint32``; equal for equal text everywhere."""
    shingles = _shingles(text)
    minima = np.full(NUM_HASHES, np.iinfo(np.uint64).max, dtype=np.uint64)
    room = np.empty((min(_BLOCK, len(shingles)), NUM_HASHES), dtype=np.uint64)
    for start in range(0, len(shingles), _BLOCK):
        block = shingles[start : start + _BLOCK, None]
        # Multiply-add modulo 2^64; the high bits are the hash (Dietzfelbinger 1996).
        hashes = np.multiply(block, _FACTORS, out=room[: len(block)])
        hashes += _TERMS
        np.minimum(minima, hashes.min(axis=0), out=minima)
    return (minima >> np.uint64(32)).astype(np.uint32)


def _shingles(text: str) -> _UINT:
    """Hashes of all runs of five characters, repeated ones too; case and the width of spaces do not count."""
    characters = np.frombuffer(" ".join(text.casefold().split()).encode("utf-32-le"), dtype=np.uint32)
    width = min(SHINGLE_CHARACTERS, max(len(characters), 1))
    count = max(len(characters) - width + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(width):
        hashes *= np.uint64(0x100000001B3)
        hashes += characters[offset : offset + count]
    return _mixed(hashes)


def _mixed(values: _UINT) -> _UINT:
    """SplitMix64's finaliser (Steele et al. 2014), so that like shingles have unlike hashes."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FACTORS = _mixed(np.arange(1, NUM_HASHES + 1, dtype=np.uint64)) | np.uint64(1)
_TERMS = _mixed(np.arange(NUM_HASHES + 1, 2 * NUM_HASHES + 1, dtype=np.uint64))
