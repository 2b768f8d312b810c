"""What became of the rows that were read: learned, cut, dropped. No row leaves a training set uncounted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

IGNORED = -100
"""The label of a token that teaches nothing, as in transformers."""


def teaches(labels: Sequence[int]) -> bool:
    """Whether a row has anything to learn: its first token is never predicted, so a later one must have a label."""
    return any(label != IGNORED for label in labels[1:])


@dataclass
class RowCounts:
    """Counts of rows, and of tokens that have a label. ``rows == learned + dropped``; ``cut`` rows are among both."""

    rows: int = 0
    """All that were given."""

    learned: int = 0
    """Rows with something to learn within ``max_length``."""

    cut: int = 0
    """Rows longer than ``max_length``: what stood behind it is not learned."""

    dropped: int = 0
    """Rows with nothing to learn."""

    tokens: int = 0
    """Labelled tokens that are learned."""

    tokens_cut: int = 0
    """Labelled tokens behind ``max_length``."""

    def add(self, whole: Sequence[int], kept: Sequence[int]) -> None:
        """Count one row by its labels before and after it was cut."""
        self.rows += 1
        self.cut += len(kept) < len(whole)
        learned = sum(label != IGNORED for label in kept[1:]) if teaches(kept) else 0
        self.learned += learned > 0
        self.dropped += learned == 0
        self.tokens += learned
        self.tokens_cut += sum(label != IGNORED for label in whole[1:]) - learned

    def given(self, encoded: Iterable[dict[str, list[int]]]) -> Iterator[dict[str, list[int]]]:
        """Rows that are joined before they are cut, counted as they pass: none of them is cut."""
        for row in encoded:
            self.add(row["labels"], row["labels"])
            yield row

    def as_dict(self) -> dict[str, int]:
        """Names and counts, for JSON and tables."""
        return asdict(self)


class EncodedRows(list[dict[str, list[int]]]):
    """Encoded rows, and what became of those that were given."""

    def __init__(self, rows: Iterable[dict[str, list[int]]], counts: RowCounts) -> None:
        super().__init__(rows)
        self.counts = counts
