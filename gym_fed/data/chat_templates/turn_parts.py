"""Locate texts of single messages in a rendered conversation, for turns and parts that are learned on their own.

A message's text is where the conversation differs from the one with another text in its place. Two placeholders
without a common edge are tried, since a template may write the same character next to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gym_fed.data.chat_templates.rendering import Message, Span, Template, UnclearTurnsError

_PLACEHOLDERS = ("[[placeholder-7c1f]]", "zzplaceholder4d2ezz")
_SPACE = re.compile(r"\s*")


def text_span(
    template: Template, messages: list[Message], tools: Any, turn: int, value: str, key: str = "content"
) -> Span:
    """Return the span of a message's text, without white space at its ends, in the rendered conversation.

    Args:
        turn: The index of the message.
        value: Its text.
        key: The key of the text in the message.

    Raises:
        UnclearTurnsError: If the template does not render the text as it is.
    """
    text, value = template.text(messages, tools), value.strip()
    spans = []
    for placeholder in _PLACEHOLDERS:
        changed = [*messages[:turn], {**messages[turn], key: placeholder}, *messages[turn + 1 :]]
        spans.append(_difference(text, template.text(changed, tools)))
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    at = text.rfind(value, start, end)
    if at < 0:
        raise UnclearTurnsError
    return at, at + len(value)


def masked_spans(
    template: Template, messages: list[Message], tools: Any, given: Sequence[Message]
) -> list[Span]:
    """Return the spans of the parts of texts that are not learned (``masked``), in order.

    Args:
        messages: The messages as they are rendered.
        given: The messages of the row; their reasoning may be rendered as a part of the content, or not at all.
    """
    spans = []
    for turn, message in enumerate(given):
        for key, ranges in message.get("masked", {}).items():
            held = key if key in messages[turn] else "content"
            value = message[key]
            if value.strip() not in str(messages[turn].get(held)):
                continue  # reasoning that is left out
            start, end = text_span(template, messages, tools, turn, value, held)
            offset = start - (len(value) - len(value.lstrip()))
            found = ((max(start, offset + first), min(end, offset + last)) for first, last in ranges)
            spans += [span for span in found if span[0] < span[1]]
    return sorted(spans)


def without(spans: Iterable[Span], masked: Sequence[Span]) -> list[Span]:
    """Return ``spans``, sorted, without the parts in ``masked``."""
    kept = []
    for start, end in sorted(spans):
        for first, last in masked:
            if first < end and last > start:
                kept.append((start, first))
                start = last
        kept.append((start, end))
    return [(start, end) for start, end in kept if start < end]


def ends_of(text: str, spans: Iterable[Span], ends: Iterable[str]) -> list[Span]:
    """Return the spans of the tokens of ``ends`` at the ends of a turn's spans."""
    found, tokens = [], [end for end in ends if end]
    for first, last in spans:
        start = last
        while end := max(
            (end for end in tokens if text[first:start].rstrip().endswith(end)), key=len, default=""
        ):
            start = first + len(text[first:start].rstrip()) - len(end)
        found += [(start, last)] if start < last else []
    return found


def end_after(text: str, at: int, ends: Iterable[str]) -> list[Span]:
    """Return the span of the token of ``ends`` after ``at`` and white space, if there is one."""
    space = _SPACE.match(text, at)
    start = at if space is None else space.end()
    tokens = [end for end in ends if text.startswith(end, start)]
    return [(start, start + max(map(len, tokens)))] if tokens else []


def _difference(text: str, other: str) -> Span:
    """Return the span of ``text`` that differs from ``other``."""
    limit = min(len(text), len(other))
    start = next((at for at in range(limit) if text[at] != other[at]), limit)
    shared = next((n for n in range(limit - start) if text[-1 - n] != other[-1 - n]), limit - start)
    return start, len(text) - shared
