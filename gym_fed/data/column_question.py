"""Ask the user to confirm guessed columns; without a terminal, refuse the file and name the option."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeVar

import typer
from pydantic import BaseModel

from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.data.bounded import delimiter_name
from gym_fed.data.column_guess import ColumnGuess, Raw, columns_option, guess_rest
from gym_fed.data.files import DataFile, delimiter_in, find_files, read_raw
from gym_fed.data.formats.base import BadRow
from gym_fed.data.formats.text import Text
from gym_fed.data.reading import format_of, renaming, unknown_format
from gym_fed.data.rows import RowKind

Config = TypeVar("Config", bound=BaseModel)
_SAMPLE_ROWS = 20
_SHOWN_CHARACTERS, _NAME_CHARACTERS, _NAMES = 60, 40, 12
_LABEL_CHARACTERS = 20
"""Median length in characters above which a column counts as text instead of labels."""
_AGREED = "GYM_AGREED_COLUMNS"
"""Environment variable with the answers so far, so that all processes of a command ask only once."""


def agreed_columns(
    path: str | Path,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    kind: RowKind = "any",
    yes: bool = False,
) -> dict[str, str]:
    """Return the column mapping for a file: the given columns, or a guess that the user confirms.

    Args:
        path: A file, folder, pattern or URL.
        format: The file's format; a guess is made for ``auto`` only.
        columns: Columns given by the user. They are kept; the other required columns are guessed.
        kind: The kind of rows that is needed.
        yes: True to accept the guess without a prompt, and print it.

    Returns:
        The columns. They are unchanged if they are sufficient, or if the rest cannot be guessed; missing columns are
        reported when the file is read.

    Raises:
        GymError: ``DATA_INVALID`` without a terminal, with the full ``--columns`` option as remedy; ``USAGE`` if the
            user declines; errors of reading the file.
    """
    given = dict(columns or {})
    if format != "auto":
        return given
    file = next(iter(find_files(path)))
    rows = list(islice(read_raw(file), _SAMPLE_ROWS))
    sample = [row for _, row in rows if isinstance(row, dict)]
    _report_delimiter(file)
    if not sample or len(sample) < len(rows):
        return given
    try:
        named = _renamed(sample, given)
    except BadRow as bad:
        raise GymError(ErrorCode.DATA_INVALID, f"{rows[0][0]}: {bad.problem}", bad.remedy) from bad
    other_texts = None if "text" in given else _other_text_column(named)
    if other_texts is None and _is_known(named[0], kind):
        return given
    guess = guess_rest(named, kind)
    if guess is None or guess.columns == given:
        return given
    agreed = json.loads(os.environ.get(_AGREED, "{}"))
    key = json.dumps([*guess.columns.items(), *guess.unread])
    if key in agreed:
        return guess.columns
    if not yes and not (sys.stdin.isatty() and err.is_terminal):
        refused = unknown_format(sample[0], guess)
        if other_texts is not None:
            refused = BadRow(
                f"only 'text' would be trained on, but column {other_texts!r} also has text",
                f"to ignore it, add --columns text=text; if these columns are right, add: {guess.option}",
            )
        elif given:
            refused = BadRow(
                f"{columns_option(given)} does not specify enough columns",
                f"if these columns are right, add: {guess.option}",
            )
        raise GymError(ErrorCode.DATA_INVALID, f"{rows[0][0]}: {refused.problem}", refused.remedy)
    _show(file.name, guess, sample)
    if not yes and not typer.confirm("Use these columns?", default=True, err=True):
        raise GymError(
            ErrorCode.USAGE, f"{file.name}: its columns are not confirmed", f"specify them: {guess.option}"
        )
    _is_new(key)
    return guess.columns


def with_agreed_columns(config: Config, kind: RowKind, yes: bool) -> Config:
    """Return the config with confirmed columns for each file in ``data`` and ``eval_data`` whose layout is unknown.

    Raises:
        GymError: See ``agreed_columns``.
    """
    changed = {}
    for key in ("data", "eval_data"):
        sources = [
            source
            if source.path is None
            else source.model_copy(
                update={
                    "columns": agreed_columns(source.path, source.format, source.columns, kind=kind, yes=yes)
                }
            )
            for source in getattr(config, key, ())
        ]
        if sources != list(getattr(config, key, ())):
            changed[key] = sources
    return config.model_copy(update=changed) if changed else config


def _report_delimiter(file: DataFile) -> None:
    """Report once per file that a ``.csv`` file is not separated by commas."""
    delimiter = delimiter_in(file)
    if file.suffix == ".tsv" or delimiter in (None, ",") or not _is_new(f"{file.name} {delimiter}"):
        return
    err.print(
        f"{file.name}: columns are separated by {delimiter_name(delimiter)}", markup=False, soft_wrap=True
    )


def _is_new(key: str) -> bool:
    """Record a report or confirmation; return False if this process or its parent has recorded it before."""
    agreed = json.loads(os.environ.get(_AGREED, "{}"))
    os.environ[_AGREED] = json.dumps({**agreed, key: True})
    return key not in agreed


def _renamed(sample: Sequence[Raw], columns: Mapping[str, str]) -> list[Raw]:
    """Rename the columns of a sample, dropping rows that lack one of them.

    Raises:
        BadRow: If the first row lacks one.
    """
    rename = renaming(columns)
    if rename is None:
        return list(sample)
    renamed = [rename(sample[0])]
    for row in sample[1:]:
        with suppress(BadRow):  # reading the file will report it
            renamed.append(rename(row))
    return renamed


def _is_known(row: Raw, kind: RowKind) -> bool:
    """Return True if a format can read the row; a prompt without an answer does not count if answers are needed."""
    try:
        matched = format_of(row)
    except BadRow:
        return False
    return matched.kind != "prompt" or kind in ("prompt", "any")


def _other_text_column(sample: Sequence[Raw]) -> str | None:
    """Return the first text column that reading only the ``text`` column would ignore.

    Labels, codes, links and JSON metadata do not count.
    """
    if not _is_text_row(sample[0]):
        return None
    for name in dict.fromkeys(name for row in sample for name in row if name != "text"):
        values = [row.get(name) for row in sample]
        texts = [value for value in values if isinstance(value, str) and not value.lstrip().startswith("{")]
        if (
            2 * len(texts) > len(values)
            and median(map(len, texts)) > _LABEL_CHARACTERS
            and median(len(text.split()) for text in texts) > 1
        ):
            return str(name)
    return None


def _is_text_row(row: Raw) -> bool:
    try:
        return isinstance(format_of(row), Text)
    except BadRow:
        return False


def _show(name: str, guess: ColumnGuess, sample: Sequence[Raw]) -> None:
    err.print(f"{name}: its columns are read as:", markup=False)
    for ours, theirs in guess.columns.items():
        value = next((row[theirs] for row in sample if row.get(theirs)), "")
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
        named = json.dumps(plain(theirs, _NAME_CHARACTERS), ensure_ascii=False)
        err.print(f"  {ours:<10} <- {named}: {plain(shown, _SHOWN_CHARACTERS)}", markup=False)
    if guess.unread:
        unread = ", ".join(plain(name, _NAME_CHARACTERS) for name in guess.unread[:_NAMES])
        err.print(f"  not read:     {unread}{', ...' if len(guess.unread) > _NAMES else ''}", markup=False)
    err.print(f"to choose other columns: {guess.option}", style="dim", markup=False, soft_wrap=True)
