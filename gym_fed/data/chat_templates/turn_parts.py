"""Locate the texts of single messages in a rendered conversation, to train on individual turns and parts.

A message's text is where the conversation differs from one with a placeholder in its place. Two placeholders without
common first or last characters are tried, since a template may write the same character next to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gym_fed.data.chat_templates.rendering import Message, Span, Template, UnclearTurnsError, common_prefix

_PLACEHOLDERS = ("[[placeholder-7c1f]]", "zzplaceholder4d2ezz")
THINK, END_THINK = "<think>\n", "\n</think>"
"""Marks of reasoning in the content."""
_SPACE = re.compile(r"\s*")


def text_span(
    template: Template,
    text: str,
    messages: list[Message],
    tools: Any,
    turn: int,
    value: str,
    key: str = "content",
) -> Span:
    """Return the span of a message's text, without white space at its ends, in the rendered conversation.

    Args:
        text: The rendered conversation.
        turn: The index of the message.
        value: Its text, or a part of it; the last occurrence counts.
        key: The key of the text in the message.

    Raises:
        UnclearTurnsError: If the template does not render the text unchanged.
    """
    spans = []
    for placeholder in _PLACEHOLDERS:
        changed = [*messages[:turn], {**messages[turn], key: placeholder}, *messages[turn + 1 :]]
        spans.append(_difference(text, template.text(changed, tools)))
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    at = text.rfind(value.strip(), start, end)
    if at < 0:
        raise UnclearTurnsError
    return at, at + len(value.strip())


def masked_spans(
    template: Template, text: str, messages: list[Message], tools: Any, given: Sequence[Message]
) -> list[Span]:
    """Return the spans of the parts of texts that are not trained on (``masked``), in order.

    Args:
        text: The rendered conversation.
        messages: The messages as they are rendered.
        given: The messages of the row, whose reasoning may be rendered as a part of the content, or not at all.
    """
    spans = []
    for turn, message in enumerate(given):
        for key, ranges in message.get("masked", {}).items():
            value, rendered_key = message[key], key
            rendered, lead = value.strip(), len(value.lstrip()) - len(value)
            if key not in messages[turn]:  # the reasoning is in the content, or omitted
                rendered_key, rendered, lead = "content", f"{THINK}{value}{END_THINK}", len(THINK)
            if rendered not in str(messages[turn].get(rendered_key)):
                continue
            start, end = text_span(template, text, messages, tools, turn, rendered, rendered_key)
            offset = start + lead
            candidates = ((max(start, offset + first), min(end, offset + last)) for first, last in ranges)
            spans += [span for span in candidates if span[0] < span[1]]
    return sorted(spans)


def without(spans: Iterable[Span], masked: Sequence[Span]) -> list[Span]:
    """Return ``spans``, sorted, without the parts in ``masked``."""
    remaining = []
    for start, end in sorted(spans):
        for first, last in masked:
            if first < end and last > start:
                remaining.append((start, first))
                start = last
        remaining.append((start, end))
    return [(start, end) for start, end in remaining if start < end]


def ends_of(text: str, spans: Iterable[Span], ends: Iterable[str]) -> list[Span]:
    """Return the spans of the tokens of ``ends`` at the ends of a turn's spans."""
    end_spans, tokens = [], [end for end in ends if end]
    for first, last in spans:
        start = last
        while end := max(
            (end for end in tokens if text[first:start].rstrip().endswith(end)), key=len, default=""
        ):
            start = first + len(text[first:start].rstrip()) - len(end)
        end_spans += [(start, last)] if start < last else []
    return end_spans


def end_after(text: str, at: int, ends: Iterable[str]) -> list[Span]:
    """Return the span of the token of ``ends`` after ``at`` and white space, if there is one."""
    space = _SPACE.match(text, at)
    start = at if space is None else space.end()
    tokens = [end for end in ends if text.startswith(end, start)]
    return [(start, start + max(map(len, tokens)))] if tokens else []


def _difference(text: str, other: str) -> Span:
    """Return the span of ``text`` that differs from ``other``."""
    start = common_prefix(text, other)
    shared = min(common_prefix(text[::-1], other[::-1]), len(text) - start, len(other) - start)
    return start, len(text) - shared
