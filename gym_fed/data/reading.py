"""Read datasets into rows of ``gym_fed.data.rows``, with renamed columns; errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import FORMATS
from gym_fed.core.text import counted, plain
from gym_fed.data.bounded import CsvRow, columns_of
from gym_fed.data.column_guess import ColumnGuess, guess_rest
from gym_fed.data.files import DataFile, Placed, find_files, read_raw
from gym_fed.data.formats._masks import learning_roles
from gym_fed.data.formats.base import BadRow, EmptyCell, Format, Raw, as_object, parsed, unread_noted
from gym_fed.data.rows import MEDIA, SURROGATE_REMEDY, PlacedDict, Row, surrogate_in

PlacedRow = tuple[str, Row]
Rename = Callable[[Any], Any]
_COUNTED_ROWS = 100_000
"""Maximum number of rows to read after an empty cell, to count further empty cells."""
_SHOWN_NAMES, _SHOWN_CHARACTERS = 20, 40


@dataclass(frozen=True)
class Learned:
    """The parts of a source's conversations to train on: ``roles_to_train`` and ``train_on_eos`` of ``DataConfig``."""

    roles: Sequence[str] | None = None
    ends: str = "turn"

    def mark(self, row: Row) -> None:
        """Add the settings to a row that was read with them.

        Raises:
            BadRow: If it is not a conversation.
        """
        if self == Learned():
            return
        if "messages" not in row:
            raise self.refused()
        if self.ends != "turn":
            row["train_on_eos"] = self.ends

    def refused(self) -> BadRow:
        """Return the error for a row that is not a conversation."""
        key = "train_on_eos" if self.roles is None else "roles_to_train"
        return BadRow(
            f"is not a conversation, but {key} applies to turns", f"remove {key}, or use conversations"
        )


def load_rows(
    path: str | Path, format: str = "auto", *, columns: Mapping[str, str] | None = None
) -> list[Row]:
    """Read a dataset.

    Args:
        path: A ``.json`` file with a list of rows, a ``.jsonl`` file with a row per line, a ``.csv`` or ``.parquet``
            file, or a ``.txt`` file, which is one text; any of these compressed with gzip; a folder or pattern of such
            files; or an fsspec URL.
        format: A name in ``gym_fed.core.registries.FORMATS``, or ``auto`` to detect it by the keys of a file's first
            row.
        columns: Column names in the file, by the names that the format expects.

    Returns:
        At least one row; see ``gym_fed.data.rows``.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming file, line (or row) and remedy.
    """
    return [row for _, row in iter_rows(path, format, rename=renaming(columns or {}))]


def iter_rows(
    path: str | Path,
    format: str = "auto",
    *,
    rename: Rename | None = None,
    text_lines: bool = False,
    learned: Learned = Learned(),
) -> Iterator[PlacedRow]:
    """Stream ``load_rows``, each row with its place.

    Args:
        path: See ``load_rows``.
        format: See ``load_rows``.
        rename: Renames the keys of raw rows to those of the format; may raise ``BadRow``.
        text_lines: True to read each line of a ``.txt`` file as a row.
        learned: The parts of conversations to train on.
    """
    if format != "auto":
        FORMATS.type_of(format)  # an unknown format is refused before anything is opened
    for file in find_files(path):
        empty = True
        raw = read_raw(file, text_lines=text_lines)
        for placed in converted(raw, format, rename, file.folder, learned):
            empty = False
            yield placed
        if empty:
            raise GymError(ErrorCode.DATA_INVALID, f"{file.name} contains no rows", "add at least one row")


def iter_raw(path: str | Path, format: str = "auto") -> Iterator[tuple[str, Any, Row]]:
    """Stream ``iter_rows`` with the raw rows: place, raw row, row."""
    for file in find_files(path):
        last: list[Any] = [None]

        def remembered(file: DataFile = file, last: list[Any] = last) -> Iterator[Placed]:
            for place, raw in read_raw(file):
                last[0] = raw
                yield place, raw

        for place, row in converted(remembered(), format, folder=file.folder):
            yield place, last[0], row


def converted(
    raw_rows: Iterable[Placed],
    format: str,
    rename: Rename | None = None,
    folder: Path | None = None,
    learned: Learned = Learned(),
) -> Iterator[PlacedRow]:
    """Convert raw rows of one format; ``auto`` is decided by the first row.

    Raises:
        GymError: ``DATA_INVALID`` naming the place.
    """
    reader: Format | None = None if format == "auto" else FORMATS.type_of(format)()
    rows = iter(raw_rows)
    for number, (place, raw) in enumerate(rows, start=1):
        try:
            renamed = as_object(raw if rename is None else rename(raw))
            if reader is None:
                reader = format_of(renamed)
            if reader.kind != "supervised" and learned != Learned():
                raise learned.refused()
            with unread_noted() as unread, learning_roles(learned.roles):
                row = reader.read(renamed)
            for column in MEDIA:
                if column in row:
                    row[column] = [_medium(source, folder, column) for source in row[column]]
                _check_places(row, column)
            learned.mark(row)
            if (problem := surrogate_in(row)) is not None:
                raise BadRow(problem, SURROGATE_REMEDY)
        except BadRow as bad:
            problem = bad.problem
            if isinstance(bad, EmptyCell):
                problem += _other_empty_rows(reader, rows, rename, number)
            raise GymError(ErrorCode.DATA_INVALID, f"{place}: {problem}", bad.remedy) from bad
        yield place, PlacedDict.of(row, place, unread, getattr(renamed, "columns", None))


def _other_empty_rows(
    reader: Format | None, rest: Iterator[Placed], rename: Rename | None, number: int
) -> str:
    """Report how many rows, from row ``number`` on, have an empty cell, if there are several."""
    empty, total = 1, number
    with suppress(GymError):  # an unreadable place further on is reported once this row is fixed
        for total, (_, raw) in enumerate(islice(rest, _COUNTED_ROWS), start=number + 1):  # noqa: B007
            try:
                renamed = as_object(raw if rename is None else rename(raw))
                (reader or format_of(renamed)).read(renamed)
            except EmptyCell:
                empty += 1
            except BadRow:
                continue
    return "" if empty == 1 else f"; {empty} of the first {total} rows have an empty cell"


def format_of(row: Row) -> Format:
    """Return the first format that a row's columns match.

    Raises:
        BadRow: If they match none.
    """
    columns = {**dict.fromkeys(columns_of(row), ""), **row}  # an empty cell does not imply a different format
    # Formats of other packages are imported only if no built-in format matches.
    for names in (FORMATS.own, FORMATS.usable):
        for candidate in sorted(map(FORMATS.type_of, names()), key=lambda type_: type_.order):
            if candidate.matches(columns):
                format: Format = candidate()
                return format
    raise unknown_format(row, guess_rest([row]))


def unknown_format(row: Row, guess: ColumnGuess | None) -> BadRow:
    """Return the error for a row of unknown format, with a ``--columns`` option if columns can be guessed."""
    names = [plain(str(name), _SHOWN_CHARACTERS) for name in row]
    shown = ", ".join(map(repr, names[:_SHOWN_NAMES])) + (", ..." if len(names) > _SHOWN_NAMES else "")
    needed = (
        "rows need messages, conversations (ShareGPT), instruction and output (Alpaca), prompt, or text; "
    )
    return BadRow(
        f"no known format has the columns {shown or '(none)'}",
        f"if these columns are right, add: {guess.option}"
        if guess is not None
        else f"{needed}choose other columns, such as --columns prompt=question,completion=answer",
    )


def _medium(source: Any, folder: Path | None, column: str) -> Any:
    """Resolve a medium: paths relative to the data file, as in LLaMA-Factory; data URLs and bytes are kept."""
    if isinstance(source, list):  # it contains the frames of a video
        return [_medium(frame, folder, column) for frame in source]
    if isinstance(source, dict) and source.get("bytes") is None and isinstance(source.get("path"), str):
        source = source["path"]
    if not isinstance(source, str) or source.startswith("data:"):
        return source
    name = MEDIA[column]
    if "://" in source:
        remedy = f"gym-fed does not download {column}; download it and use its path"
        raise BadRow(f"{name} {source!r} is a URL", remedy)
    path = Path(source).expanduser()
    for candidate in (path, *([folder / path] if folder is not None else [])):
        if candidate.is_file():
            return str(candidate.resolve())
    raise BadRow(f"no {name} file at {source!r}", "paths are relative to the data file's folder")


def _check_places(row: Row, column: str) -> None:
    """Check that a column has as many media as placeholders; without any, they precede the first question."""
    turns = row.get("messages") or row.get("prompt")
    contents = [turn.get("content") for turn in turns] if isinstance(turns, list) else [turns]
    name, count = MEDIA[column], len(row.get(column) or ())
    mark = f"<{name}>"
    places = 0
    for content in contents:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        places += sum(part["type"] == name for part in parts)
        if count:  # otherwise the mark is ordinary text
            places += sum(part.get("text", "").count(mark) for part in parts)
    if places not in (0, count):
        raise BadRow(
            f"has {counted(places, 'placeholder')} for {column}, but {counted(count, name)}",
            f"write {mark} once for each {name}",
        )


_OPTIONAL = ("system", "input", "context", "history", "tools", *MEDIA, *MEDIA.values(), "forget")
"""Columns that may be empty in a row."""
_IN_TURNS = "messages."
"""Prefix of the keys of turns among the columns."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse ``--columns``: the file's column names by the names that the format expects.

    The text is either comma-separated ``EXPECTED=IN_FILE`` pairs, or a JSON object for names that contain a comma or
    begin or end with a space.

    Raises:
        GymError: ``USAGE`` for anything else, and for a name that is given twice.
    """
    columns: dict[str, str] = {}
    for ours, theirs in _pairs(text or ""):
        if ours in columns or theirs in columns.values():
            twice = ours if ours in columns else theirs
            raise GymError(
                ErrorCode.USAGE, f"--columns: {twice!r} is given twice", "specify each column once"
            )
        columns[ours] = theirs
    return columns


def _pairs(text: str) -> list[tuple[str, str]]:
    if text.lstrip().startswith("{"):
        try:
            pairs = list(json.loads(text, object_pairs_hook=list))
        except (ValueError, TypeError, RecursionError):
            pairs = []
        if pairs and all(isinstance(word, str) and word for pair in pairs for word in pair):
            return [(str(ours), str(theirs)) for ours, theirs in pairs]
        raise GymError(
            ErrorCode.USAGE,
            f"--columns: {plain(text, _SHOWN_CHARACTERS)} is not a JSON object of names",
            """write '{"prompt": "question", "completion": "answer"}'""",
        )
    pairs = []
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
            raise GymError(
                ErrorCode.USAGE,
                f"--columns: {part!r} is not a pair of names",
                "write OURS=THEIRS, separated by commas, such as prompt=question,completion=answer; for names with "
                "commas, use a JSON object",
            )
        pairs.append((ours, theirs))
    return pairs


def renaming(columns: Mapping[str, str]) -> Callable[[Any], Any] | None:
    """Return a function that renames the columns of a raw row; None if there is nothing to rename.

    The function raises ``BadRow`` for a column that the row lacks, and for an empty required column.
    """
    if not columns:
        return None
    within = {
        ours.removeprefix(_IN_TURNS): theirs for ours, theirs in columns.items() if ours.startswith(_IN_TURNS)
    }
    columns = {ours: theirs for ours, theirs in columns.items() if not ours.startswith(_IN_TURNS)}

    def rename(raw: Any) -> Raw:
        row = _lifted(as_object(raw), columns.values())
        known = columns_of(row)
        missing = [theirs for theirs in columns.values() if theirs not in known]
        if missing:
            names = [plain(str(key), _SHOWN_CHARACTERS) for key in known]
            shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
            raise BadRow(
                f"has no column {missing[0]!r}",
                f"use one of its columns: {shown}" if shown else "drop the row: it is empty",
            )
        filled = {ours: theirs for ours, theirs in columns.items() if not _is_empty(row.get(theirs))}
        empty = [theirs for ours, theirs in columns.items() if ours not in filled and ours not in _OPTIONAL]
        if empty:
            raise EmptyCell(f"column {empty[0]!r}")
        rest = {key: value for key, value in row.items() if key not in columns.values()}
        if within:
            turns = columns.get("messages", "messages")
            filled, rest = (
                {**filled, "messages": turns},
                {key: value for key, value in rest.items() if key != turns},
            )
            row = {**row, turns: [_renamed_turn(turn, within) for turn in _turns(row.get(turns), turns)]}
        header = (*(name for name in known if name not in columns.values()), *columns)
        return _RenamedRow(
            {**rest, **{ours: row[theirs] for ours, theirs in filled.items()}}, header, columns
        )

    return rename


def _lifted(row: Raw, names: Iterable[str]) -> Raw:
    """Return a row with nested columns (``data.messages``, at any depth) as top-level columns."""
    for name in names:
        outer, _, inner = name.partition(".")
        if name in row or not inner or not isinstance(row.get(outer), dict):
            continue
        nested = _lifted(row[outer], [inner])
        if inner not in nested:
            continue
        rest = {key: value for key, value in nested.items() if key != inner}
        others = {key: value for key, value in row.items() if key != outer}
        row = {**others, **({outer: rest} if rest else {}), name: nested[inner]}
    return row


def _turns(value: Any, key: str) -> list[Any]:
    """Return a list of turns, which may be given as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, key)
    if not isinstance(value, list):
        raise BadRow(f"{key!r} is not a list of turns", "specify the column with the turns: messages=COLUMN")
    return value


def _renamed_turn(turn: Any, columns: Mapping[str, str]) -> Raw:
    """Rename the keys of a turn to the names that formats expect.

    Raises:
        BadRow: If it lacks the key of its role.
    """
    turn = as_object(turn)
    if columns.get("role", "role") not in turn:
        raise BadRow(f"a turn has no {columns.get('role', 'role')!r}", "correct messages.role")
    rest = {key: value for key, value in turn.items() if key not in columns.values() and key not in columns}
    return {**rest, **{ours: turn[theirs] for ours, theirs in columns.items() if theirs in turn}}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


class _RenamedRow(CsvRow):
    """A raw row with renamed columns that stores the file's names for suggestions; equal to a plain dict.

    Attributes:
        columns: The file's column names by the names that formats expect.
    """

    def __init__(self, row: Mapping[str, Any], header: tuple[str, ...], columns: Mapping[str, str]) -> None:
        super().__init__(row, header)
        self.columns = columns
