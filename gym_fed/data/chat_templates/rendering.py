"""Render chat templates, with generation marks, and with training variants that have marks and earlier reasoning.

A child process renders in transformers' environment, with ``raise_exception``, ``tojson`` and ``strftime_now``.

TRL ships the chat templates of many model families, most of them with a marked copy (``NAME.jinja`` and
``NAME_training.jinja`` in ``trl/chat_templates``). While rows are encoded, a model's template that equals an
original is replaced by its marked copy. The files are read without importing TRL, which takes seconds.

Many templates drop the reasoning of earlier turns. A row that teaches reasoning needs it in its text, so it is kept
with the template's own switch if there is one, and otherwise by removing the condition from the template's source.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import render_chat
from gym_fed.core.bounded.trusted import trl_folder
from gym_fed.core.errors import ErrorCode, GymError

Message = dict[str, Any]
Span = tuple[int, int]
"""The start (inclusive) and end (exclusive) of a range of characters."""


@dataclass(frozen=True)
class Template:
    """A chat template with its variables.

    Attributes:
        variables: Other variables of the template: special tokens, switches.
    """

    source: str
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self, messages: list[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """Render a conversation; ``prompt`` adds the generation prompt.

        Raises:
            TemplateError, TypeError: If the template refuses the conversation.
            GymError: If it exceeds a limit; see ``render_chat``.
        """
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def marked(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Span]]:
        """Render a conversation, with the spans between ``{% generation %}`` and ``{% endgeneration %}``."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: list[Message], tools: Any, **arguments: Any) -> tuple[str, list[Span]]:
        texts, spans = render_chat(
            conversations=[messages], tools=tools, chat_template=self.source, **arguments, **self.variables
        )
        return texts[0], spans[0] if spans else []


def template_of(tokenizer: Any, tools: Any = None) -> Template:
    """Return the template that a tokenizer, or a processor, uses for rows with these tools."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    is_processor = inner is not tokenizer  # it has one template, and no method to choose one
    source = tokenizer.chat_template if is_processor else tokenizer.get_chat_template(None, tools)
    return Template(str(source), dict(inner.special_tokens_map))


_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SUFFIX = "_training.jinja"


def has_marks(template: str) -> bool:
    """Return True if the template itself marks the assistant's tokens."""
    return _MARK.search(template) is not None


def training_template(template: str) -> str | None:
    """Return TRL's marked copy of a template, or None."""
    return _counterparts().get(_key(template))


@lru_cache(maxsize=1)
def _counterparts() -> dict[str, str]:
    counterparts = {}
    for marked in sorted(trl_templates().glob(f"*{_SUFFIX}")):
        original = marked.with_name(marked.name.removesuffix(_SUFFIX) + ".jinja")
        if original.is_file():
            counterparts[_key(original.read_text(encoding="utf-8"))] = marked.read_text(encoding="utf-8")
    return counterparts


def trl_templates() -> Path:
    """Return the folder of TRL's templates."""
    folder = trl_folder()
    if folder is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "the package trl is not installed", "pip install 'trl>=1.16,<1.17'"
        )
    return folder


def _key(template: str) -> str:
    """Normalise a template, since Jinja drops one newline at the end of a file."""
    return template.removesuffix("\n")


_SWITCHES = {
    "truncate_history_thinking": False,  # Nemotron
    "preserve_thinking": True,  # Qwen3.6, LFM2.5, Gemma 4
    "keep_past_thinking": True,
    "clear_thinking": False,  # GLM
}
_CONDITIONS = (
    ("loop.index0 > ns.last_user_index and reasoning_content", "reasoning_content"),  # GLM-4
    ("(preserve_thinking and message.get('tool_calls'))", "preserve_thinking"),  # Gemma 4
    (
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
    ),  # DeepSeek
    (" and not future_final_message.found", ""),  # GPT-OSS, before tool calls
    (  # GPT-OSS, before an answer that is not the last
        '"<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
        '("<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" if message.thinking '
        'else "") + "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
    ),
)


def showing_history(template: Template) -> Template:
    """Return the template changed to show the reasoning of every turn, if a known condition hides it."""
    source = template.source
    for condition, instead in _CONDITIONS:
        source = source.replace(condition, instead)
    switches = {name: value for name, value in _SWITCHES.items() if name in source}
    return replace(template, source=source, variables={**template.variables, **switches})


_PROBE: list[Message] = [{"role": "user", "content": "x"}]


class UnclearTurnsError(Exception):
    """The assistant's text cannot be located."""


def own_marks(
    template: Template, messages: list[Message], tools: Any, ends: tuple[str, ...]
) -> tuple[str, dict[int, list[Span]]]:
    """Locate turns by the template's marks; return the text, and the spans of each assistant message.

    Args:
        template: A template with marks.
        ends: The tokenizer's special tokens; white space after one of them at the end of a span is excluded.
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
    """Locate turns without marks; an answer is the text that its turn adds to the prompt before it.

    Args:
        turns: The indices of messages to locate.

    Raises:
        UnclearTurnsError: If the template renders a turn differently when another turn follows.
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
    """Return the offset of the answer to ``before``; None if ``text`` does not continue from it."""
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
            count = min(count, len(closing))  # text at the end, which only the last turn has
        if not before < count <= len(spans):
            raise UnclearTurnsError
        spans_of[turn], before = spans[before:count], count
    if before != len(spans):
        raise UnclearTurnsError
    return spans_of


def _shared(text: str, prompt: str) -> int:
    """Return the length of the common prefix of ``text`` and ``prompt``, up to the last complete token of a header."""
    common = prompt[: common_prefix(text, prompt)]
    if len(common) == len(prompt):
        return len(common)
    return 1 + max(common.rfind(end) for end in ">\n]")


def common_prefix(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    lengths = range(1, min(len(text), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: not text.startswith(other[:length]))


def _opening(template: Template) -> str:
    """Return the generation prompt after a question."""
    prompted, plain = template.text(_PROBE, prompt=True), template.text(_PROBE)
    return prompted[common_prefix(prompted, plain) :]


def _opened(words: str, opening: str) -> int:
    """Return how many characters at the start of ``words`` belong to the generation prompt."""
    ending = next((n for n in range(len(opening), 0, -1) if words.startswith(opening[-n:])), 0)
    return ending or _shared(words, opening)


def _trimmed(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    start, end = span
    words = text[start:end].rstrip()
    return (start, start + len(words)) if words.endswith(ends) else span
