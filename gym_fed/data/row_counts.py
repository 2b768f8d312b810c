"""Count learned, truncated and dropped rows; every row is counted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

IGNORED = -100
"""The label of a token without a loss, as in transformers."""

_COUNTS = ("rows", "learned", "cut", "dropped", "tokens", "tokens_cut")
_MANY_DROPPED = 0.1
_MANY_CUT = 0.5
_KEPT_WHOLE = 0.95


def teaches(labels: Sequence[int]) -> bool:
    """Return True if a row has a token to train on. The first token is never predicted, so a later one must have a
    label."""
    return any(label != IGNORED for label in labels[1:])


def num_labels(labels: Sequence[int]) -> int:
    """Return the number of tokens to train on; the first token is never predicted."""
    return len(labels) - labels.count(IGNORED) - (bool(labels) and labels[0] != IGNORED)


@dataclass
class RowCounts:
    """Counts of rows and labelled tokens. ``rows == learned + dropped``; a ``cut`` row is in one of the two."""

    rows: int = 0
    """Number of rows in the data."""

    learned: int = 0
    """Number of rows with tokens to train on within ``max_length``."""

    cut: int = 0
    """Number of rows longer than ``max_length``; the tokens beyond it are not trained on."""

    dropped: int = 0
    """Number of rows without tokens to train on."""

    tokens: int = 0
    """Number of labelled tokens that are trained on."""

    tokens_cut: int = 0
    """Number of labelled tokens beyond ``max_length``."""

    lengths: array[int] = field(default_factory=lambda: array("Q"), repr=False, compare=False)
    """The length of each row in tokens before truncation, if known."""

    unread: dict[str, int] = field(default_factory=dict, compare=False)
    """Number of rows with each unread key; see ``rows.unread_keys``."""

    forms: dict[str, int] = field(default_factory=dict, compare=False)
    """Outcomes of rows of plain strings; see ``string_rows.count_forms``."""

    max_length: int | None = field(default=None, compare=False)
    """The length to which rows were truncated, if it differs from the run's."""

    notes: list[str] = field(default_factory=list, compare=False)
    """Messages to the user about the rows, one line each."""

    usual_length: int = field(default=0, compare=False)
    """The result of ``length_of_most`` for rows that were encoded by an earlier run, whose lengths are not stored."""

    @classmethod
    def whole(cls, rows: int) -> RowCounts:
        """Return counts for rows that are all trained on completely; labelled tokens are not counted."""
        return cls(rows=rows, learned=rows)

    def add(self, whole: Sequence[int], remaining: Sequence[int]) -> None:
        """Count one row by its labels before and after it was cut."""
        learned = num_labels(remaining)
        lost = num_labels(whole) - learned if len(remaining) < len(whole) else 0
        self.count(len(whole), cut=len(remaining) < len(whole), tokens=learned, tokens_cut=lost)

    def count(self, length: int, *, cut: bool, tokens: int, tokens_cut: int) -> None:
        """Count one row of ``length`` tokens; it is dropped if ``tokens`` is 0."""
        self.rows += 1
        self.cut += cut
        self.learned += tokens > 0
        self.dropped += tokens == 0
        self.tokens += tokens
        self.tokens_cut += tokens_cut
        self.lengths.append(length)

    def given(self, encoded: Iterable[dict[str, list[int]]]) -> Iterator[dict[str, list[int]]]:
        """Count and yield rows that are packed; these count as uncut."""
        for row in encoded:
            self.add(row["labels"], row["labels"])
            yield row

    def __add__(self, other: RowCounts) -> RowCounts:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        unread = {
            key: self.unread.get(key, 0) + other.unread.get(key, 0) for key in {**self.unread, **other.unread}
        }
        lengths, notes = self.lengths + other.lengths, self.notes + other.notes
        return RowCounts(**sums, lengths=lengths, unread=unread, notes=notes)

    def as_dict(self) -> dict[str, Any]:
        """Return names and counts, for JSON and tables."""
        extra = {name: getattr(self, name) for name in ("unread", "forms") if getattr(self, name)}
        return {**{name: getattr(self, name) for name in _COUNTS}, **extra}

    def facts(self) -> dict[str, Any]:
        """Return everything except the row lengths as JSON-compatible values, for ``RowCounts(**facts)``."""
        return {**self.as_dict(), "notes": self.notes, "usual_length": self.length_of_most()}

    def summary(self) -> str:
        """Describe the counts of rows in a few words."""
        if self.learned == self.rows and not self.cut:
            return f"{counted(self.rows, 'row')}, all used"
        return f"{counted(self.rows, 'row')}, {self.dropped:,} dropped, {self.cut:,} cut"

    def describe(self, max_length: int | None, use: Literal["learned", "measured"] = "learned") -> str:
        """Describe the counts on one line; ``use`` says what the rows are used for."""
        used = "trained on" if use == "learned" else use
        labelled, max_length = self.tokens + self.tokens_cut, self.max_length or max_length
        if self.learned == self.rows and not self.cut:
            every = (
                f"the row is {used}" if self.rows == 1 else f"all {counted(self.rows, 'row', 'are')} {used}"
            )
            return every + (f": {counted(labelled, 'labelled token')}" if labelled else "")
        why = " (no tokens to train on)" if self.dropped else ""
        parts = [
            f"{self.learned:,} of {counted(self.rows, 'row', 'are')} {used}, {self.dropped:,} dropped{why}"
        ]
        if self.cut:
            parts.append(f"{self.cut:,} are longer than max_length {max_length}")
        if labelled:
            parts.append(f"{self.tokens:,} of {counted(labelled, 'labelled token', 'are')} {used}")
        return "; ".join(parts)

    def warning(self, max_length: int | None) -> str | None:
        """Return a warning with its remedy if many rows or labelled tokens are lost; None otherwise.

        The threshold is a tenth of the rows dropped, or half of the labelled tokens cut.
        """
        labelled, max_length = self.tokens + self.tokens_cut, self.max_length or max_length
        problems = []
        if self.dropped > _MANY_DROPPED * self.rows:
            problems.append(
                f"{self.dropped:,} of {counted(self.rows, 'row', 'are')} dropped, with no tokens to train on"
            )
        if self.tokens_cut > _MANY_CUT * labelled:
            problems.append(
                f"{self.tokens_cut:,} of {counted(labelled, 'labelled token', 'are')} beyond max_length {max_length}"
            )
        return f"{' and '.join(problems)}; {self.remedy(max_length)}" if problems else None

    def nothing_learned(self, max_length: int | None) -> GymError:
        """Return the ``DATA_INVALID`` error for data without a row to train on, with reason and remedy."""
        max_length = self.max_length or max_length
        problem, whose = "the row has no tokens to train on", "its"
        if self.rows > 1:
            problem, whose = f"none of the {counted(self.rows, 'row')} has tokens to train on", "their"
        if not self.tokens_cut:
            return GymError(
                ErrorCode.DATA_INVALID,
                f"{problem}: {whose} answers are empty, or excluded from training",
                "keep at least one assistant turn that has neither weight: 0 nor train: false",
            )
        longer = f"{problem} within max_length={max_length}"
        return GymError(
            ErrorCode.DATA_INVALID,
            longer,
            f"raise max_length, or shorten the prompts; {self.remedy(max_length)}",
        )

    def remedy(self, max_length: int | None) -> str:
        """Return what to do about rows that are dropped or cut."""
        enough = self.length_of_most()
        if max_length is None or enough <= max_length:
            return "see which parts of each row are trained on: gym data show FILE --model MODEL"
        return f"max_length: {enough} would fit {_KEPT_WHOLE:.0%} of the rows"

    def length_of_most(self) -> int:
        """Return the ``max_length`` that 95% of rows fit into."""
        if not self.lengths:
            return self.usual_length
        ordered = sorted(self.lengths)
        return ordered[max(0, -(-int(100 * _KEPT_WHOLE) * len(ordered) // 100) - 1)]


class EncodedRows(list[dict[str, Any]]):
    """Encoded rows with the counts of their sources."""

    def __init__(self, rows: Iterable[dict[str, Any]], counts: RowCounts) -> None:
        super().__init__(rows)
        self.counts = counts


def counts_of(encoded: Sequence[dict[str, Any]], given: int) -> RowCounts:
    """Return the counts of an algorithm's encoded rows; for a plain list, missing rows count as dropped."""
    if isinstance(encoded, EncodedRows):
        return encoded.counts
    learned = min(len(encoded), given)
    return RowCounts(rows=given, learned=learned, dropped=given - learned)
