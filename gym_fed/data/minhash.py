"""Near-duplicate detection by MinHash and locality-sensitive hashing (``datasketch``).

Broder 1997, "On the resemblance and containment of documents": the share of hash functions under which two sets have
the same minimum estimates their Jaccard similarity. Banding as in Leskovec, Rajaraman and Ullman, "Mining of Massive
Datasets", section 3.4: texts are compared only when all r minima of one of b bands agree, which two texts of
similarity s do with probability 1 - (1 - s^r)^b.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

NUM_HASHES = 128
SHINGLE_CHARACTERS = 5
SCHEME = "affine32"
"""Seed of ``datasketch``; with another one, stored signatures would no longer match the same texts."""

_RECALL = 0.99
_BLOCK = 4096  # shingles per batch, whose hashes take 2 MiB


class NearDuplicates:
    """An index of texts; the first text of each group of near-duplicates is kept.

    Holds 512 bytes of minima and the bands' keys for each text, never the texts.

    Args:
        threshold: Estimated Jaccard similarity of the texts' shingles from which on one is a duplicate. The estimate's
            standard deviation is at most 0.044.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        rows = rows_per_band(threshold)
        self.threshold = threshold
        self._bands = MinHashLSH(num_perm=NUM_HASHES, params=(NUM_HASHES // rows, rows))
        self._minima: list[Any] = []

    def find_or_add(self, text: str) -> tuple[int, float] | None:
        """Return an earlier near-duplicate, by its index among the added texts, and the similarity; else add the text.

        None when there is none; the text is added then.
        """
        minima = signature(text)
        similar = ((float(self._minima[at].jaccard(minima)), -at) for at in self._bands.query(minima))
        best = max(similar, default=(0.0, 0))
        if best[0] >= self.threshold:
            return -best[1], best[0]
        self._bands.insert(len(self._minima), minima)
        self._minima.append(minima)
        return None


def rows_per_band(threshold: float) -> int:
    """The most rows per band with which a pair at the threshold is compared with probability 99%."""
    for rows in range(NUM_HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (NUM_HASHES // rows) >= _RECALL:
            return rows
    return 1


def folded(text: str) -> str:
    """Normalise case and whitespace."""
    return " ".join(text.casefold().split())


def signature(text: str) -> Any:
    """MinHash of a text's 5-character shingles (``LeanMinHash``), ignoring case and whitespace."""
    from datasketch import LeanMinHash

    normalised = folded(text)
    shingles = list(
        {
            normalised[at : at + SHINGLE_CHARACTERS]
            for at in range(max(len(normalised) - SHINGLE_CHARACTERS + 1, 1))
        }
    )
    minima = _empty().copy()
    for start in range(0, len(shingles), _BLOCK):
        minima.update_batch([s.encode("utf-8", "surrogatepass") for s in shingles[start : start + _BLOCK]])
    return LeanMinHash(minima)


@functools.cache
def _empty() -> Any:
    """The hash functions, drawn once per process."""
    from datasketch import MinHash

    return MinHash(NUM_HASHES, hashfunc=zlib.crc32, scheme=SCHEME)
