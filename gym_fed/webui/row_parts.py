"""Prepare rows for display: turns with their trained parts, and the choice of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.data.column_guess import guess_columns
from gym_fed.data.formats.base import BadRow, as_object
from gym_fed.data.paging import PagedFile
from gym_fed.data.preview import Segment
from gym_fed.data.reading import format_of

_SAMPLE_ROWS = 20
_MAX_NAMES = 200
_MAX_CHARACTERS = 200

Turn = tuple[str, str]
"""The role and text of a turn."""


def turns_of(row: dict[str, Any], answer: str) -> list[Turn]:
    """Return the turns of a row.

    Args:
        row: A row in the format of ``gym_fed.data.rows``.
        answer: Key of the answer: ``chosen``, ``rejected`` or ``completion``; empty for none.
    """
    if "messages" in row:
        return list(_of_messages(row["messages"]))
    turns: list[Turn] = []
    for key in ("prompt", answer or "completion"):
        value = row.get(key)
        if isinstance(value, str):
            turns.append(("assistant" if key != "prompt" else "prompt", value))
        elif isinstance(value, Sequence):
            turns += _of_messages(value)
    return turns


def _of_messages(messages: Iterable[Any]) -> Iterator[Turn]:
    for message in messages:
        for key in ("reasoning_content", "content"):
            text = message.get(key)
            if isinstance(text, str) and text.strip():
                yield str(message.get("role", ""))[:40], text.strip()


def parts_of(
    segments: Sequence[Segment], turns: Iterable[Turn], room: int
) -> tuple[list[dict[str, Any]], int]:
    """Split the text of a sequence at turn boundaries; text that the chat template adds has no role.

    Args:
        segments: Segments of the sequence in order.
        turns: Turns of the row; texts changed by the template are skipped.
        room: Maximum number of characters to return.

    Returns:
        Parts ``{"role", "text", "learnt"}``, and the number of characters that exceed ``room``.
    """
    text = "".join(segment.text for segment in segments)
    bounds: list[tuple[int, str]] = []
    at = 0
    for role, words in turns:
        start = text.find(words, at)
        if start >= 0:
            at = start + len(words)
            bounds += [(start, role), (at, "")]
    parts: list[dict[str, Any]] = []
    place, role = 0, ""
    for segment in segments:
        end = min(place + len(segment.text), room)
        while place < end:
            while bounds and bounds[0][0] <= place:
                role = bounds.pop(0)[1]
            stop = min(end, bounds[0][0]) if bounds else end
            parts.append({"role": role, "text": text[place:stop], "learnt": segment.learnt})
            place = stop
        if place >= room:
            break
    return parts, max(0, len(text) - room)


def column_names(file: PagedFile) -> list[str]:
    """Return the names of the first row's columns that have a value; empty for an unreadable row."""
    try:
        first = next(file.rows(), None)
        row = {} if first is None else as_object(first.load())
    except (BadRow, GymError):
        return []
    return [str(name)[:_MAX_CHARACTERS] for name, value in row.items() if value is not None][:_MAX_NAMES]


def column_choices(file: PagedFile) -> dict[str, Any] | None:
    """Return the names of text columns, and a guess of which are ``prompt`` and ``completion``.

    The result is None if the layout is known, the rows are unreadable, or there are no text columns.
    """
    sample = []
    try:
        for raw in islice(file.rows(), _SAMPLE_ROWS):
            sample.append(as_object(raw.load()))
        if not sample or format_of(sample[0]).kind != "prompt":
            return None
    except BadRow:
        if len(sample) < 1:
            return None
    except GymError:
        return None
    names = dict.fromkeys(name for row in sample for name, value in row.items() if isinstance(value, str))
    shown = [name for name in names if len(name) <= _MAX_CHARACTERS][:_MAX_NAMES]
    guess = guess_columns(sample, "supervised")
    columns = {} if guess is None else guess.columns
    # a prompt without a completion is a known layout
    is_prompt = "prompt" in names and "completion" not in columns
    return {"names": shown, "guess": columns} if shown and not is_prompt else None
