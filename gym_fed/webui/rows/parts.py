"""What a page shows of one sequence: its turns, and in each of them what the model learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

Turn = tuple[str, str]
"""Role and words."""


class LearntText(Protocol):
    """A run of a sequence that is learnt, or not."""

    @property
    def text(self) -> str:
        """As it was decoded."""

    @property
    def learnt(self) -> bool:
        """Whether the model learns it."""


def turns_of(row: dict[str, Any], answer: str) -> list[Turn]:
    """The turns of a row.

    Args:
        row: See ``gym_fed.data.rows``.
        answer: Key of the answer of a pair: ``chosen``, ``rejected`` or ``completion``; empty for none.
    """
    if "messages" in row:
        return list(_of_messages(row["messages"]))
    found: list[Turn] = []
    for key in ("prompt", answer or "completion"):
        value = row.get(key)
        if isinstance(value, str):
            found.append(("assistant" if key != "prompt" else "prompt", value))
        elif isinstance(value, Sequence):
            found += _of_messages(value)
    return found


def _of_messages(messages: Iterable[Any]) -> Iterator[Turn]:
    for message in messages:
        for key in ("reasoning_content", "content"):
            text = message.get(key)
            if isinstance(text, str) and text.strip():
                yield str(message.get("role", ""))[:40], text.strip()


def parts_of(
    segments: Sequence[LearntText], turns: Iterable[Turn], room: int
) -> tuple[list[dict[str, Any]], int]:
    """A sequence's text cut where turns begin and end; what the chat template adds has no role.

    Args:
        segments: Of the sequence, in order.
        turns: Of the row; words that the template changed are left out.
        room: Characters that may be given.

    Returns:
        Parts ``{"role", "text", "learnt"}``, and how many characters there are beyond the room.
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
