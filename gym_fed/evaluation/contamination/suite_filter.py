"""The filter of a suite: a few runs of words of every row, so that training rows that hold one of them are found."""

from __future__ import annotations

import base64
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.problems import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.evaluation.contamination.bloom import MAX_PLACES, BloomFilter
from gym_fed.evaluation.contamination.grams import GRAM_WORDS, MIN_WORDS, gram_hash, grams, texts_of, words_of
from gym_fed.trust.identity.canonical import canonical_digest, canonical_json

MAX_BYTES = 1_000_000
"""Of the bits of one suite."""
RATE = 1e-6
"""Probability that a run of words that is in no row is taken for one."""
GRAMS_PER_ROW = 8
BOILERPLATE_ROWS = 10
"""A run of words that more rows share says nothing about one of them."""
_MAX_FILE_BYTES = 4 << 20


class _FilterDocument(StrictModel):
    format: int = Field(default=2, ge=2, le=2)
    suite: str = Field(min_length=1, max_length=200)
    locks: dict[str, str] = Field(max_length=10_000)
    num_rows: int = Field(ge=0)
    short_rows: int = Field(ge=0)
    num_grams: int = Field(ge=0)
    grams_per_row: int = Field(ge=0)
    lengths: list[Annotated[int, Field(ge=MIN_WORDS, le=GRAM_WORDS)]] = Field(max_length=GRAM_WORDS)
    places: int = Field(ge=1, le=MAX_PLACES)
    bits: str = Field(max_length=_MAX_FILE_BYTES)


@dataclass(frozen=True)
class SuiteFilter:
    """Finds the rows of a suite in other texts.

    Attributes:
        suite: Name.
        locks: Digest of each task's definition and rows.
        num_rows: Rows that can be found.
        short_rows: Rows whose texts are all shorter than 8 words, or boilerplate; they cannot be found.
        num_grams: Runs of words that were added.
        grams_per_row: Most of one row.
        lengths: Of the runs, in words.
        bloom: Holds them.
    """

    suite: str
    locks: dict[str, str]
    num_rows: int
    short_rows: int
    num_grams: int
    grams_per_row: int
    lengths: tuple[int, ...]
    bloom: BloomFilter

    @property
    def rate(self) -> float:
        """Probability that one run of words of a text is claimed wrongly."""
        return self.bloom.rate

    @property
    def digest(self) -> str:
        """Names the filter: equal tasks and rows have equal digests."""
        return canonical_digest(self._document().model_dump(mode="json"))

    def found_in(self, text: str) -> str | None:
        """The first run of words of a text that is one of a row of the suite; None where there is none."""
        words = words_of(text)
        for length in self.lengths:
            for at, one in enumerate(grams(words, length)):
                if one in self.bloom:
                    return " ".join(words[at : at + length])
        return None

    def save(self, path: Path) -> None:
        """Write the filter as one file."""
        write_atomically(path, canonical_json(self._document().model_dump(mode="json")))

    @classmethod
    def load(cls, path: Path) -> SuiteFilter:
        """Read a filter, also one of somebody else.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` for what is no filter.
        """
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no filter at {path}: {error.strerror}") from error
        try:
            if len(data) > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
            found = _FilterDocument.model_validate_json(data)
            bits = base64.b64decode(found.bits, validate=True)
            if not 0 < len(bits) <= MAX_BYTES:
                raise ValueError(f"{len(bits)} bytes of bits")
        except ValidationError as error:
            raise _bad(path, first_problem(error)) from error
        except ValueError as error:
            raise _bad(path, str(error)) from error
        return cls(
            found.suite,
            found.locks,
            found.num_rows,
            found.short_rows,
            found.num_grams,
            found.grams_per_row,
            tuple(found.lengths),
            BloomFilter(bits, found.places),
        )

    def _document(self) -> _FilterDocument:
        return _FilterDocument(
            suite=self.suite,
            locks=self.locks,
            num_rows=self.num_rows,
            short_rows=self.short_rows,
            num_grams=self.num_grams,
            grams_per_row=self.grams_per_row,
            lengths=list(self.lengths),
            places=self.bloom.places,
            bits=base64.b64encode(self.bloom.bits).decode(),
        )


def build_filter(suite: str, rows: Iterable[Any], locks: dict[str, str]) -> SuiteFilter:
    """The filter of evaluation rows.

    Of each row the runs with the smallest hashes are added, as many as fit: a text that holds the whole row holds them
    all, one that holds half of it very likely some.

    Args:
        suite: Its name.
        rows: As data: every text in them counts.
        locks: What the rows are, for the digest.
    """
    found: list[dict[int, int]] = [_row_grams(row) for row in rows]
    shared = Counter(one for row in found for one in row)
    kept = [{g: n for g, n in row.items() if shared[g] <= BOILERPLATE_ROWS} for row in found]
    count, chosen = GRAMS_PER_ROW, _chosen(kept, GRAMS_PER_ROW)
    while count > 1 and _num_bytes(len(chosen)) > MAX_BYTES:
        count -= 1
        chosen = _chosen(kept, count)
    rate = RATE
    while _num_bytes(len(chosen), rate) > MAX_BYTES:
        rate *= 2
    bloom = BloomFilter.of(sorted(chosen), len(chosen), rate)
    findable = sum(bool(row) for row in kept)
    lengths = tuple(sorted(set(chosen.values())))
    return SuiteFilter(suite, locks, findable, len(kept) - findable, len(chosen), count, lengths, bloom)


def _row_grams(row: Any) -> dict[int, int]:
    """Hashes of a row's runs of words, with their lengths; a text of 8 to 12 words is one run."""
    found: dict[int, int] = {}
    for text in texts_of(row):
        words = words_of(text)
        if len(words) >= GRAM_WORDS:
            found.update(dict.fromkeys(grams(words), GRAM_WORDS))
        elif len(words) >= MIN_WORDS:
            found[gram_hash(words)] = len(words)
    return found


def _chosen(rows: Sequence[dict[int, int]], count: int) -> dict[int, int]:
    return {one: row[one] for row in rows for one in heapq.nsmallest(count, row)}


def _num_bytes(num_hashes: int, rate: float = RATE) -> float:
    from math import log

    return -num_hashes * log(rate) / log(2) ** 2 / 8


def _bad(path: Path, what: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{path}: no filter of a suite: {what}", "build it again")
