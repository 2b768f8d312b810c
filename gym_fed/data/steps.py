"""Pipeline steps that keep or drop rows one by one and count drops by reason, and a MinHash index of near-duplicates.

Broder 1997, "On the resemblance and containment of documents": the share of hash functions under which two sets have
the same minimum estimates their Jaccard similarity. Banding as in Leskovec, Rajaraman and Ullman, "Mining of Massive
Datasets", section 3.4: texts are compared only if all minima of a band agree.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Judge = Callable[[str, Row], str | None]
"""A function of a row's place and the row that returns the reason to drop it, or None."""


@dataclass(frozen=True)
class Duplicate:
    """A dropped row, the earlier row it repeats, and their similarity (1 for exact copies)."""

    place: str
    earlier: str
    similarity: float


@dataclass
class Report:
    """The outcome of one pass: ``read``, ``kept``, and ``dropped`` by reason."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: list[Duplicate] = field(default_factory=list)
    ended: str | None = None
    """Name of the source that ended a mixture under ``first_exhausted``; other sources may have rows left."""


class Step(ABC):
    """A step's configuration; ``start`` creates its state for one pass."""

    @abstractmethod
    def start(self, tokenizer: Any, report: Report) -> Judge:
        """Create the state of a pass."""

    @abstractmethod
    def key(self) -> Any:
        """Return JSON that changes whenever the step's outcome may change; None if this is unknown."""


@dataclass(frozen=True)
class FilterStep(Step):
    """Keep rows that a function accepts and whose size is within bounds."""

    function: Callable[[Row], bool] | None
    function_key: str | None
    min_tokens: int | None
    max_tokens: int | None
    min_characters: int | None
    max_characters: int | None
    max_repetition: float | None

    def start(self, tokenizer: Any, report: Report) -> Judge:
        from gym_fed.data.encoding import encode_one

        def judge(place: str, row: Row) -> str | None:
            text = text_of(row)
            if self.min_characters is not None and len(text) < self.min_characters:
                return "too few characters"
            if self.max_characters is not None and len(text) > self.max_characters:
                return "too many characters"
            if self.max_repetition is not None and repetition(text) > self.max_repetition:
                return "repeats itself"
            if self.min_tokens is not None or self.max_tokens is not None:
                tokens = len(encode_one(tokenizer, row)["input_ids"])
                if self.min_tokens is not None and tokens < self.min_tokens:
                    return "too few tokens"
                if self.max_tokens is not None and tokens > self.max_tokens:
                    return "too many tokens"
            return None if self.function is None or self.function(row) else "filtered"

        return judge

    def key(self) -> Any:
        if self.function is not None and self.function_key is None:
            return None
        limits = (self.min_tokens, self.max_tokens, self.min_characters, self.max_characters)
        return ["filter", self.function_key, *limits, self.max_repetition]


@dataclass(frozen=True)
class DedupStep(Step):
    """Keep the first of equal or nearly equal rows."""

    exact: bool
    near: float | None

    def start(self, tokenizer: Any, report: Report) -> Judge:
        seen: dict[bytes, str] = {}
        index = None if self.near is None else NearDuplicates(self.near)
        places: list[str] = []

        def judge(place: str, row: Row) -> str | None:
            if self.exact:
                digest = row_digest(row)
                if digest in seen:
                    report.duplicates.append(Duplicate(place, seen[digest], 1.0))
                    return "exact duplicate"
                seen[digest] = place
            if index is not None:
                match = index.find_or_add(text_of(row))
                if match is not None:
                    report.duplicates.append(Duplicate(place, places[match[0]], match[1]))
                    return "near duplicate"
                places.append(place)
            return None

        return judge

    def key(self) -> Any:
        return ["dedup", self.exact, self.near, *([] if self.near is None else [SCHEME])]


def row_digest(row: Row) -> bytes:
    """Return a 16-byte digest of a row's content."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def text_of(row: Row) -> str:
    """Return all text of a row, one turn per line."""
    return "\n".join(_texts(row))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        if "function" in value:
            yield json.dumps(value["function"], sort_keys=True, ensure_ascii=False)
        keys = ("text", "messages", "prompt", "completion", "chosen", "rejected", "answer")
        for key in (*keys, "content", "tool_calls", "tools"):
            if key in value:
                yield from _texts(value[key])


def repetition(text: str) -> float:
    """Return the share of characters in 10-character runs that occur more than once; 0 for short texts.

    Based on the rules of Rae et al. 2021 (Gopher), table A1, but on characters instead of words, so that it works for
    all languages.
    """
    width = 10
    runs = [text[at : at + width] for at in range(0, len(text) - width + 1)]
    if len(runs) < 5 * width:
        return 0.0
    counts = Counter(runs)
    return sum(count for count in counts.values() if count > 1) / len(runs)


NUM_HASHES = 128
SHINGLE_CHARACTERS = 5
SCHEME = "affine32"
"""Hash scheme of ``datasketch``; with any other, stored signatures would not match."""

_RECALL = 0.99
_BLOCK = 4096  # shingles per batch, whose hashes take 2 MiB


class NearDuplicates:
    """An index of texts; the first text of each group of near-duplicates is kept.

    For each text, it stores 512 bytes of minima and the keys of the bands, but not the text.

    Args:
        threshold: Minimum estimated Jaccard similarity of duplicates' shingles. The estimate's standard deviation is
            at most 0.044.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        rows = rows_per_band(threshold)
        self.threshold = threshold
        self._bands = MinHashLSH(num_perm=NUM_HASHES, params=(NUM_HASHES // rows, rows))
        self._minima: list[Any] = []

    def find_or_add(self, text: str) -> tuple[int, float] | None:
        """Return the index and similarity of an earlier near-duplicate; if there is none, add the text."""
        minima = signature(text)
        similar = ((float(self._minima[at].jaccard(minima)), -at) for at in self._bands.query(minima))
        best = max(similar, default=(0.0, 0))
        if best[0] >= self.threshold:
            return -best[1], best[0]
        self._bands.insert(len(self._minima), minima)
        self._minima.append(minima)
        return None


def rows_per_band(threshold: float) -> int:
    """Return the maximum rows per band for which a pair at the threshold is compared with probability 99%."""
    for rows in range(NUM_HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (NUM_HASHES // rows) >= _RECALL:
            return rows
    return 1


def folded(text: str) -> str:
    """Normalise case and whitespace."""
    return " ".join(text.casefold().split())


def signature(text: str) -> Any:
    """Return the MinHash of a text's 5-character shingles (``LeanMinHash``), ignoring case and whitespace."""
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
    """Create the hash functions once per process."""
    from datasketch import MinHash

    return MinHash(NUM_HASHES, hashfunc=zlib.crc32, scheme=SCHEME)
