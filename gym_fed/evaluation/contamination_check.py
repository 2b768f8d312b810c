"""Check training rows for contamination by evaluation suites, with a Bloom filter of word runs for each suite."""

from __future__ import annotations

import base64
import hashlib
import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.json_files import canonical_digest, canonical_json
from gym_fed.core.text import counted
from gym_fed.data.steps import Row, folded, text_of

GRAM_WORDS = 13
MIN_WORDS = 8
"""Minimum number of words; shorter texts occur by chance."""

_WORD = re.compile("[぀-ヿ㐀-鿿가-힣]|[^\\W_]+")
"""A word, or a character of a script written without spaces."""


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation and white space."""
    return _WORD.findall(folded(text))


def grams(words: list[str], length: int = GRAM_WORDS) -> Iterator[int]:
    """Yield 64-bit hashes of all runs of ``length`` words."""
    for at in range(len(words) - length + 1):
        yield _gram_hash(words[at : at + length])


def _gram_hash(words: list[str]) -> int:
    """Return 64 bits of the BLAKE2b hash of words."""
    text = " ".join(words).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def texts_of(row: Any) -> Iterator[str]:
    """Yield all texts in a row, at any depth of its lists and mappings."""
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict):
        for value in row.values():
            yield from texts_of(value)
    elif isinstance(row, list | tuple):
        for value in row:
            yield from texts_of(value)


_MASK = (1 << 64) - 1
MAX_PLACES = 30


class BloomFilter:
    """A Bloom filter of 64-bit hashes.

    Args:
        bits: The bit array, 8 bits per byte.
        places: Number of bits set per hash, from 1 to 30.
    """

    def __init__(self, bits: bytes | bytearray, places: int) -> None:
        if not bits or not 1 <= places <= MAX_PLACES:
            raise ValueError(
                f"invalid filter: {counted(len(bits), 'byte')}, {counted(places, 'bit')} per hash"
            )
        self.bits = bytearray(bits)
        self.places = places

    @classmethod
    def of(cls, hashes: Iterable[int], num_hashes: int, rate: float) -> BloomFilter:
        """Create a filter with false positive probability ``rate``.

        Args:
            rate: Between 0 and 1.
        """
        num_bits = -max(1, num_hashes) * math.log(rate) / math.log(2) ** 2
        num_bytes = max(8, math.ceil(num_bits / 8))
        places = min(MAX_PLACES, max(1, round(num_bytes * 8 / max(1, num_hashes) * math.log(2))))
        bloom = cls(bytearray(num_bytes), places)
        for value in hashes:
            for at in bloom._places(value):
                bloom.bits[at >> 3] |= 1 << (at & 7)
        return bloom

    def __contains__(self, value: int) -> bool:
        return all(self.bits[at >> 3] >> (at & 7) & 1 for at in self._places(value))

    @property
    def rate(self) -> float:
        """The false positive probability: the fraction of set bits to the power of ``places``."""
        share = int.from_bytes(self.bits, "big").bit_count() / (len(self.bits) * 8)
        return share**self.places

    def _places(self, value: int) -> Iterable[int]:
        size = len(self.bits) * 8
        for turn in range(1, self.places + 1):
            mixed = value + turn * 0x9E3779B97F4A7C15 & _MASK
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
            yield (mixed ^ mixed >> 31) % size


MAX_BYTES = 1_000_000
"""Maximum size in bytes of a suite's bits."""
RATE = 1e-6
"""False positive rate of a run of words."""
GRAMS_PER_ROW = 8
BOILERPLATE_ROWS = 10
"""Maximum number of rows that share a run of words; a more common run is ignored as boilerplate."""
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
    """Detects the rows of a suite in other texts.

    Attributes:
        locks: Digest of each task's definition and rows.
        num_rows: The number of rows that can be found.
        short_rows: The number of rows that cannot be found, since all their texts are boilerplate or shorter than 8
            words.
        num_grams: The number of runs of words in the filter.
        grams_per_row: Maximum runs of words added per row.
        lengths: Lengths of the runs in words.
        bloom: The hashes of the runs.
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
        """The false positive probability of one run of words."""
        return self.bloom.rate

    @property
    def digest(self) -> str:
        """A digest that is equal for equal tasks and rows."""
        return canonical_digest(self._document().model_dump(mode="json"))

    def found_in(self, text: str) -> str | None:
        """Return the first run of words of a text that occurs in the suite; None if there is none."""
        words = words_of(text)
        for length in self.lengths:
            for at, gram in enumerate(grams(words, length)):
                if gram in self.bloom:
                    return " ".join(words[at : at + length])
        return None

    def save(self, path: Path) -> None:
        """Write the filter to a file."""
        write_atomically(path, canonical_json(self._document().model_dump(mode="json")))

    @classmethod
    def load(cls, path: Path) -> SuiteFilter:
        """Read a filter from a possibly untrusted file.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` if it is not a filter.
        """
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no filter at {path}: {error.strerror}") from error
        try:
            if len(data) > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
            document = _FilterDocument.model_validate_json(data)
            bits = base64.b64decode(document.bits, validate=True)
            if not 0 < len(bits) <= MAX_BYTES:
                raise ValueError(f"a bit array of {counted(len(bits), 'byte')}")
        except ValidationError as error:
            raise _bad(path, first_problem(error)) from error
        except ValueError as error:
            raise _bad(path, str(error)) from error
        return cls(
            document.suite,
            document.locks,
            document.num_rows,
            document.short_rows,
            document.num_grams,
            document.grams_per_row,
            tuple(document.lengths),
            BloomFilter(bits, document.places),
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
    """Build the filter of evaluation rows.

    For each row, the runs with the smallest hashes are added, as many as fit. A text that contains the full row
    contains all of them; a text with half of the row very likely contains some.

    Args:
        rows: The evaluation rows; all texts in a row are used.
        locks: Digests that identify the rows.
    """
    row_grams: list[dict[int, int]] = [_row_grams(row) for row in rows]
    shared = Counter(gram for row in row_grams for gram in row)
    rare = [{g: n for g, n in row.items() if shared[g] <= BOILERPLATE_ROWS} for row in row_grams]
    count, chosen = GRAMS_PER_ROW, _chosen(rare, GRAMS_PER_ROW)
    while count > 1 and _num_bytes(len(chosen)) > MAX_BYTES:
        count -= 1
        chosen = _chosen(rare, count)
    rate = RATE
    while _num_bytes(len(chosen), rate) > MAX_BYTES:
        rate *= 2
    bloom = BloomFilter.of(sorted(chosen), len(chosen), rate)
    findable = sum(bool(row) for row in rare)
    lengths = tuple(sorted(set(chosen.values())))
    return SuiteFilter(suite, locks, findable, len(rare) - findable, len(chosen), count, lengths, bloom)


def _row_grams(row: Any) -> dict[int, int]:
    """Return hashes of a row's runs of words with their lengths; a text of 8 to 12 words is one run."""
    lengths_by_gram: dict[int, int] = {}
    for text in texts_of(row):
        words = words_of(text)
        if len(words) >= GRAM_WORDS:
            lengths_by_gram.update(dict.fromkeys(grams(words), GRAM_WORDS))
        elif len(words) >= MIN_WORDS:
            lengths_by_gram[_gram_hash(words)] = len(words)
    return lengths_by_gram


def _chosen(rows: Sequence[dict[int, int]], count: int) -> dict[int, int]:
    return {gram: row[gram] for row in rows for gram in heapq.nsmallest(count, row)}


def _num_bytes(num_hashes: int, rate: float = RATE) -> float:
    return -num_hashes * math.log(rate) / math.log(2) ** 2 / 8


def _bad(path: Path, problem: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID, f"{path}: not a contamination filter: {problem}", "build it again"
    )


_SHOWN = 20


@dataclass(frozen=True)
class ContaminatedRow:
    """A training row that contains a run of words from an evaluation row.

    Attributes:
        place: Location of the training row.
        suite: The suite whose row it contains.
        words: The run of words that both rows contain.
    """

    place: str
    suite: str
    words: str


@dataclass
class ContaminationReport:
    """The result of a contamination check.

    Attributes:
        suites: The checked suites with the digests of their filters.
        rates: The false positive rate of a run of words, by suite.
        rows: The number of checked rows.
        contaminated: The number of contaminated rows.
        first: The first contaminated rows.
    """

    suites: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    contaminated: int = 0
    first: list[ContaminatedRow] = field(default_factory=list)

    def describe(self) -> str:
        """Summarize in one line."""
        against = ", ".join(self.suites) or "no suites on this machine"
        return f"{self.contaminated} of {counted(self.rows, 'row', 'contain')} evaluation rows (checked: {against})"


class ContaminationCheck:
    """Checks rows one at a time.

    Attributes:
        report: The report on the rows so far.
    """

    def __init__(self, filters: Sequence[SuiteFilter]) -> None:
        self._filters = list(filters)
        self.report = ContaminationReport(
            {suite_filter.suite: suite_filter.digest for suite_filter in self._filters},
            {suite_filter.suite: suite_filter.rate for suite_filter in self._filters},
        )

    def find(self, place: str, row: Row) -> ContaminatedRow | None:
        """Return the contamination of a row; None for a clean one."""
        self.report.rows += 1
        text = text_of(row)
        for suite_filter in self._filters:
            if (words := suite_filter.found_in(text)) is not None:
                match = ContaminatedRow(place, suite_filter.suite, words)
                self.report.contaminated += 1
                if len(self.report.first) < _SHOWN:
                    self.report.first.append(match)
                return match
        return None


def filters_here(names: Iterable[str] | None = None) -> list[SuiteFilter]:
    """Load the filters of suites whose rows are on this machine; missing filters are built and stored.

    Args:
        names: Suites or tasks, each of which must be on this machine; None for all suites that are.

    Raises:
        GymError: See ``tasks_of``.
    """
    from gym_fed.evaluation.suites.store import listing

    filters = []
    for name in listing().suites if names is None else names:
        try:
            filters.append(_filter_of(name))
        except GymError as error:
            if names is not None or error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.MISSING_DEPENDENCY):
                raise
    return filters


@cache
def _filter_of(name: str) -> SuiteFilter:
    from gym_fed.evaluation.suites.store import evals_home
    from gym_fed.evaluation.suites.tasks import tasks_of

    tasks = tasks_of([name], graded=False)
    locks = {task.name: task.lock for task in tasks}
    cached = evals_home() / "filters" / f"{canonical_digest([2, name, locks])[:32]}.json"
    if cached.is_file():
        return SuiteFilter.load(cached)
    rows: list[Any] = [row for task in tasks for row in task.rows[task.split]]
    suite_filter = build_filter(name, rows, locks)
    suite_filter.save(cached)
    return suite_filter
