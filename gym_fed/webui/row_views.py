"""The views of a data file: a page of rows, one row, sequence lengths, and duplicates.

Each answer stops after one or two seconds of work and contains the index of the next row.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.base.models import NANO, load_tokenizer, quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import FORMATS
from gym_fed.data.formats.base import BadRow, as_object
from gym_fed.data.paging import PagedFile, PagedRow, stamp_of
from gym_fed.data.preview import PreviewedSequence, Statistics, sequences_of
from gym_fed.data.reading import converted, format_of, parse_columns, renaming
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.steps import DedupStep, Judge, Report, text_of
from gym_fed.data.string_rows import as_turns
from gym_fed.webui.row_parts import column_choices, column_names, parts_of, turns_of

SECONDS = 1.5
"""Time limit for the work of one answer."""
ROOM = 1500
"""Maximum length of a sequence on a page of rows, in characters."""
ROOM_OF_RAW = 600
"""Maximum length of an unusable row, in characters."""
ROOM_OF_ONE = 100_000
"""Maximum length of a single viewed row, in characters."""
_LENGTHS = 2000
_DUPLICATES = 100
_PROBLEMS = 20
_CACHE_SIZE = 4
_ANSWERS = {
    "chosen": "chosen",
    "rejected": "rejected",
    "liked": "completion",
    "disliked": "completion",
    "row": "completion",
}

Request = dict[str, Any]
Answer = dict[str, Any]


@dataclass
class _OpenedFile:
    """An open data file with its format and columns."""

    file: PagedFile
    format: str
    rename: Callable[[Any], Any] | None
    choices: Answer | None
    """Column choices for a file whose columns were not recognised; see ``column_choices``."""
    columns: list[str]
    """Column names of the first row."""

    def row(self, raw: PagedRow) -> dict[str, Any]:
        """Return the row in the form that the model receives.

        Raises:
            GymError: ``DATA_INVALID`` with the row's location; ``TOO_LARGE``.
        """
        placed = iter([(raw.place, raw.load())])
        [(_, row)] = converted(placed, self.format, self.rename, self.file.path.parent)
        return row


@dataclass
class _Deduplication:
    """A search for duplicates that continues over several requests."""

    judge: Judge
    report: Report
    texts: list[str] = field(default_factory=list)
    next: int = 0


class _Walk:
    """Iterates over rows from index ``start`` until the time limit.

    Attributes:
        next: Index of the next row; None at the end of the file.
    """

    def __init__(self, file: PagedFile, start: int) -> None:
        self._file, self._start = file, start
        self.next: int | None = None

    def __iter__(self) -> Iterator[PagedRow]:
        until = time.monotonic() + SECONDS
        for raw in self._file.rows(self._start):
            is_over = raw.number != self._start and time.monotonic() > until
            if is_over:
                self.next = max(raw.number, self._start)
                return
            if raw.number >= self._start:
                yield raw


class RowViews:
    """Answers requests for views, one at a time.

    Args:
        folder: Folder with the data files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: OrderedDict[Any, _OpenedFile] = OrderedDict()
        # Load it in advance, while the user looks at the list of files.
        self._tokenizers: OrderedDict[str, Any] = OrderedDict({NANO: load_tokenizer(NANO)})
        self._searches: OrderedDict[Any, _Deduplication] = OrderedDict()

    def answer(self, request: Request) -> Answer:
        """Answer a request with the view it names.

        Raises:
            GymError: Errors in the file, its columns or the model.
        """
        views = {
            "page": self._page,
            "row": self._row,
            "lengths": self._lengths,
            "duplicates": self._duplicates,
        }
        with quiet_loading():  # transformers would warn about long rows, which are counted here anyway
            return views[request["view"]](request)

    def _page(self, request: Request) -> Answer:
        """Return up to ``limit`` rows from index ``start`` that pass the filters."""
        opened, tokenizer = self._open(request), self._tokenizer(request["model"])
        shown: list[Answer] = []
        walk = _Walk(opened.file, request["start"])
        for raw in walk:
            if len(shown) == request["limit"]:
                walk.next = raw.number
                break
            if (view := self._seen(opened, raw, request, tokenizer)) is not None:
                shown.append(view)
        return {
            "rows": shown,
            "next": walk.next,
            "rows_seen": opened.file.rows_seen,
            "about_rows": opened.file.about_rows(),
            "num_rows": opened.file.num_rows,  # must follow the line above, which counts the rows of a small file
            "format": opened.format,
            "kind": None if opened.format == "auto" else FORMATS.type_of(opened.format).kind,
            "columns": opened.columns,
            "choices": opened.choices,
        }

    def _row(self, request: Request) -> Answer:
        opened = self._open(request)
        for raw in _Walk(opened.file, request["start"]):
            if raw.number == request["start"]:
                view = _view(opened, raw, request, self._tokenizer(request["model"]), ROOM_OF_ONE)
                return {**view, "raw": _raw_text(raw, ROOM_OF_ONE)}
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"{opened.file.name}: row {request['start'] + 1} does not exist, or is not known yet",
        )

    def _seen(self, opened: _OpenedFile, raw: PagedRow, request: Request, tokenizer: Any) -> Answer | None:
        """Return the view of a row, or None if a filter excludes it; cheap filters run first."""
        if request["column"] and not _has_value(raw, request["column"], request["value"]):
            return None
        if request["text"] and request["text"].casefold() not in _searched(opened, raw).casefold():
            return None
        view = _view(opened, raw, request, tokenizer, ROOM)
        if request["only"] == "problems" and not view["problem"]:
            return None
        if request["only"] == "nothing_learnt" and (view["problem"] or view["learnt"]):
            return None
        if request["least"] is not None and (view["tokens"] is None or view["tokens"] < request["least"]):
            return None
        if request["most"] is not None and (view["tokens"] is None or view["tokens"] > request["most"]):
            return None
        return view

    def _lengths(self, request: Request) -> Answer:
        """Return the number of tokens of every sequence from index ``start``, and the first unusable rows."""
        opened, tokenizer = self._open(request), self._tokenizer(request["model"])
        statistics, unusable, large = Statistics(), 0, 0
        problems: list[Answer] = []
        walk = _Walk(opened.file, request["start"])
        for raw in walk:
            if len(statistics.lengths) >= _LENGTHS:
                walk.next = raw.number
                break
            try:
                statistics.add(_sequences(opened, raw, request, tokenizer)[1])
            except GymError as error:
                large += error.code is ErrorCode.TOO_LARGE
                unusable += error.code is not ErrorCode.TOO_LARGE
                if len(problems) < _PROBLEMS:
                    problems.append(_problem(error))
        return {
            "lengths": statistics.lengths,
            "rows": statistics.rows,
            "learnt": statistics.tokens_learnt,
            "seen": statistics.tokens_seen,
            "cut": statistics.sequences_cut,
            "nothing_to_learn": statistics.nothing_to_learn,
            "unusable": unusable,
            "large": large,
            "problems": problems,
            "next": walk.next,
        }

    def _duplicates(self, request: Request) -> Answer:
        """Continue a duplicate search; the last answer contains the report."""
        opened = self._open(request)
        key = (opened.file.path, opened.file.stamp, request["columns"], request["near"])
        search = self._searches.get(key)
        if search is None or request["start"] == 0:
            report = Report()
            search = _Deduplication(DedupStep(True, request["near"]).start(None, report), report)
            _keep(self._searches, key, search)
        walk = _Walk(opened.file, search.next)
        for raw in walk:
            search.next = raw.number + 1
            self._judge(search, opened, raw)
        report = search.report
        examples = zip(report.duplicates, search.texts, strict=False)
        return {
            "next": walk.next,
            "rows": report.read,
            "num_rows": opened.file.num_rows,
            "dropped": dict(report.dropped),
            "unusable": search.next - report.read,
            "duplicates": [{**vars(duplicate), "text": text} for duplicate, text in examples],
        }

    def _judge(self, search: _Deduplication, opened: _OpenedFile, raw: PagedRow) -> None:
        try:
            row = opened.row(raw)
        except GymError:
            return
        search.report.read += 1
        reason = search.judge(raw.place, row)
        if reason is not None:
            search.report.dropped[reason] += 1
            if len(search.texts) < _DUPLICATES:
                search.texts.append(text_of(row)[:300])

    def _open(self, request: Request) -> _OpenedFile:
        path = self._folder / request["name"]
        if not path.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {request['name']}", "choose one from the list")
        key = (path, stamp_of(path), request["format"], request["columns"])
        if (opened := self._opened.get(key)) is None:
            rename = renaming(parse_columns(request["columns"]))
            file = PagedFile(path, request["name"])
            choices = column_choices(file) if request["format"] == "auto" else None
            format = _format(file, request["format"], rename)
            opened = _OpenedFile(file, format, rename, choices, column_names(file))
            _keep(self._opened, key, opened)
        return opened

    def _tokenizer(self, name: str) -> Any:
        if name not in self._tokenizers:
            _keep(self._tokenizers, name, load_tokenizer(name))
        return self._tokenizers[name]


def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)


def _format(file: PagedFile, format_name: str, rename: Callable[[Any], Any] | None) -> str:
    """Return the format's name; ``auto`` is resolved from the first row, or kept if that row is unreadable."""
    if format_name != "auto":
        FORMATS.type_of(format_name)
        return format_name
    first = next(file.rows(), None)
    try:
        if first is not None:
            raw = first.load()
            type_found = type(format_of(as_object(raw if rename is None else rename(raw))))
            return next(name for name in FORMATS.names() if FORMATS.type_of(name) is type_found)
    except (BadRow, GymError):
        pass
    return "auto"


def _sequences(
    opened: _OpenedFile, raw: PagedRow, request: Request, tokenizer: Any
) -> tuple[dict[str, Any], list[PreviewedSequence]]:
    (row,) = as_turns(tokenizer, [opened.row(raw)])
    return row, sequences_of(tokenizer, row, max_length=request["max_length"])


def _view(opened: _OpenedFile, raw: PagedRow, request: Request, tokenizer: Any, room: int) -> Answer:
    """Describe a row as the model sees it, or the row's text with its problem."""
    view: Answer = {"number": raw.number, "place": raw.place, "bytes": raw.num_bytes, "sequences": []}
    view |= {"problem": None, "raw": "", "tokens": None, "learnt": None}
    try:
        row, sequences = _sequences(opened, raw, request, tokenizer)
    except GymError as error:
        return {**view, "problem": _problem(error), "raw": _raw_text(raw, min(room, ROOM_OF_RAW))}
    view["tokens"] = max(len(sequence.encoded["input_ids"]) for sequence in sequences)
    view["learnt"] = sum(_learnt(sequence) for sequence in sequences)
    room //= len(sequences)
    for sequence in sequences:
        answer = _ANSWERS.get(sequence.name, "")
        parts, more = parts_of(sequence.segments(tokenizer), turns_of(row, answer), room)
        view["sequences"].append(
            {
                "name": sequence.name,
                "tokens": len(sequence.encoded["input_ids"]),
                "learnt": _learnt(sequence),
                "cut": sequence.cut,
                "parts": parts,
                "more": more,
            }
        )
    return view


def _learnt(sequence: PreviewedSequence) -> int:
    labels = sequence.encoded["labels"]
    return sum(label != IGNORED for label in labels[1 : len(labels) - sequence.cut])


def _problem(error: GymError) -> Answer:
    return {"message": error.message[:500], "hint": error.hint[:500]}


def _raw_text(raw: PagedRow, room: int) -> str:
    """Return a row as JSON, or the beginning of its text."""
    if raw.head:
        return raw.head[:room]
    try:
        return json.dumps(raw.load(), ensure_ascii=False, default=repr, indent=1)[:room]
    except GymError:
        return ""


def _searched(opened: _OpenedFile, raw: PagedRow) -> str:
    """Return the text of a row to search in; the raw text if the row is unusable."""
    try:
        return text_of(opened.row(raw))
    except GymError:
        return _raw_text(raw, ROOM_OF_ONE)


def _has_value(raw: PagedRow, column: str, value: str) -> bool:
    """Return True if a column, such as ``source``, has this value."""
    try:
        row = raw.load()
    except GymError:
        return False
    return isinstance(row, dict) and column in row and (not value or str(row[column])[:200] == value)
