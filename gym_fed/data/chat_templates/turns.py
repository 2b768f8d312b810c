"""Locate the assistant's turns, with their end tokens, in a rendered conversation.

What the template puts before a turn when it prompts the model to speak (the generation prompt) is not the model's, nor
is the white space behind the end token: the model is prompted by the former, and stops at the latter.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from gym_fed.data.chat_templates.rendering import Message, Span, Template

_PROBE: list[Message] = [{"role": "user", "content": "x"}]


class UnclearTurnsError(Exception):
    """The assistant's text cannot be located."""


def own_marks(
    template: Template, messages: list[Message], tools: Any, ends: tuple[str, ...]
) -> tuple[str, dict[int, list[Span]]]:
    """Locate turns by the template's marks: the text, and the spans of each assistant message.

    Args:
        template: With marks.
        messages: The conversation.
        tools: Its tools.
        ends: The tokenizer's special tokens; white space behind one of them at a span's end is cut off.
    """
    text, spans = template.marked(messages, tools)
    return text, _by_message(template, messages, tools, [_trimmed(text, span, ends) for span in spans])


def trimmed_marks(
    template: Template, messages: list[Message], tools: Any, ends: tuple[str, ...]
) -> tuple[str, dict[int, list[Span]]]:
    """Run ``own_marks`` on a training template, without the generation prompt at the start of spans."""
    text, spans_of = own_marks(template, messages, tools, ends)
    for turn, spans in spans_of.items():
        start, end = spans[0]
        if turn:
            prompt = template.text(messages[:turn], tools, prompt=True)
            start = min(max(start, _shared(text, prompt)), end)
        else:
            start = min(start + _opened(text[start:end], _opening(template)), end)
        spans_of[turn] = [(start, end), *spans[1:]]
    return text, spans_of


def by_prefix(
    template: Template, messages: list[Message], tools: Any, turns: set[int], ends: tuple[str, ...]
) -> tuple[str, dict[int, list[Span]]]:
    """Locate turns without marks: an answer is the text that its turn adds to the prompt before it.

    Args:
        turns: The messages whose words are to be found.

    Raises:
        UnclearTurnsError: When a template writes a turn otherwise once another one follows.
    """
    text = template.text(messages, tools)
    spans_of = {}
    for turn in sorted(turns):
        after = template.text(messages[: turn + 1], tools)
        start = _start(template, messages[:turn], tools, after)
        if not text.startswith(after):
            after = _unclosed(text, after, ends)
        if start is None or start > len(after) or not text.startswith(after):
            raise UnclearTurnsError
        spans_of[turn] = [_trimmed(text, (start, len(after)), ends)]
    return text, spans_of


def _unclosed(text: str, after: str, ends: tuple[str, ...]) -> str:
    """Strip the token that the template adds after whole conversations (Phi-4-mini), if ``text`` also ends with it."""
    shared_ends = (end for end in ends if end and after.endswith(end) and text.endswith(end))
    return after.removesuffix(next(shared_ends, ""))


def _start(template: Template, before: list[Message], tools: Any, text: str) -> int | None:
    """Offset of the answer to ``before``; None if ``text`` does not continue from it."""
    if not before:
        opening = _opening(template)
        at = text.find(opening) if opening else -1
        return None if at < 0 else at + len(opening)
    prompt = template.text(before, tools, prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    start, plain = _shared(text, prompt), template.text(before, tools)
    return start if text.startswith(plain) and start > len(plain) else None


def _by_message(
    template: Template, messages: list[Message], tools: Any, spans: list[Span]
) -> dict[int, list[Span]]:
    """Group spans by message: one each, or as many as the template adds with the message."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) == len(turns):
        return {turn: [span] for turn, span in zip(turns, spans, strict=True)}
    spans_of, before = {}, 0
    for turn in turns:
        count = len(spans)
        if turn != turns[-1]:
            count = len(template.marked(messages[: turn + 1], tools)[1])
            closing = template.marked([*messages[: turn + 1], *_PROBE], tools)[1]
            count = min(count, len(closing))  # an end of the text, which only the last turn has
        if not before < count <= len(spans):
            raise UnclearTurnsError
        spans_of[turn], before = spans[before:count], count
    if before != len(spans):
        raise UnclearTurnsError
    return spans_of


def _shared(text: str, prompt: str) -> int:
    """Length of the prefix that ``text`` shares with ``prompt``, up to the last whole token of a shared header."""
    common = prompt[: _common(text, prompt)]
    if len(common) == len(prompt):
        return len(common)
    return 1 + max(common.rfind(end) for end in ">\n]")


def _common(text: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    lengths = range(1, min(len(text), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: not text.startswith(other[:length]))


def _opening(template: Template) -> str:
    """The generation prompt after a question."""
    prompted, plain = template.text(_PROBE, prompt=True), template.text(_PROBE)
    return prompted[_common(prompted, plain) :]


def _opened(words: str, opening: str) -> int:
    """Number of characters of ``words`` that belong to the generation prompt: its end, or the header that it shares."""
    ending = next((n for n in range(len(opening), 0, -1) if words.startswith(opening[-n:])), 0)
    return ending or _shared(words, opening)


def _trimmed(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    start, end = span
    words = text[start:end].rstrip()
    return (start, start + len(words)) if words.endswith(ends) else span
