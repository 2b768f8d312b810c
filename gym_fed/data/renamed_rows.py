"""Rows under other names remember their file's names, so that a suggested ``--columns`` can be copied as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gym_fed.data.column_guess import ColumnGuess, guess_columns
from gym_fed.data.csv_rows import CsvRow


class RenamedRow(CsvRow):
    """A raw row whose columns are renamed. Equal to a plain dict.

    Attributes:
        columns: Names of columns in the file, by ours.
    """

    def __init__(self, row: Mapping[str, Any], header: tuple[str, ...], columns: Mapping[str, str]) -> None:
        super().__init__(row, header)
        self.columns = columns


def guess_rest(sample: Sequence[Mapping[str, Any]], kind: str = "any") -> ColumnGuess | None:
    """Guess columns as ``guess_columns`` does, by the names in the file, and keep what the user named.

    Args:
        sample: The first rows of a file, all renamed alike or none.
        kind: The kind of rows that is needed.
    """
    guess = guess_columns([dict(row) for row in sample], kind)
    given: Mapping[str, str] = getattr(sample[0], "columns", {}) if sample else {}
    if guess is None or not given:
        return guess
    guessed = {ours: given.get(theirs, theirs) for ours, theirs in guess.columns.items()}
    kept = {
        ours: theirs
        for ours, theirs in given.items()
        if ours not in guessed and theirs not in guessed.values()
    }
    unread = tuple(name for name in guess.unread if name not in kept)
    return replace(guess, columns={**kept, **guessed}, unread=unread)
