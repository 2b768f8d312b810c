"""Render a conversation as training text, mark the spans to train on, and report what the template drops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.rendering import (
    Message,
    Span,
    Template,
    UnclearTurnsError,
    by_prefix,
    has_marks,
    own_marks,
    showing_history,
    template_of,
    training_template,
    trimmed_marks,
)
from gym_fed.data.chat_templates.turn_parts import (
    END_THINK,
    THINK,
    end_after,
    ends_of,
    masked_spans,
    text_span,
    without,
)

Reasoning = Literal["learn", "drop", "off"]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_READS_REASONING = re.compile(r"""(?:\.|\[['"]|get\(['"])(?:reasoning_content|thinking|reasoning)\b""")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_TOOLS = ("has tools", "calls tools")
_REMEDY = {
    "has reasoning": "set reasoning: drop to train only on the answers, or use a template that shows it",
    **dict.fromkeys(_TOOLS, "use a model whose chat template supports tools, or drop the row"),
}


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation.

    Attributes:
        spans: Spans of characters to train on, in order.
    """

    text: str
    spans: list[Span]


def write_answered(
    tokenizer: Any,
    prompt: list[Message],
    answer: list[Message],
    tools: Any,
    place: str,
    *,
    reasoning: Reasoning = "learn",
) -> str:
    """Render a prompt and its answer with the tokenizer's template; without an answer, render only the prompt.

    Raises:
        GymError: ``DATA_INVALID`` naming the row if the template refuses it or omits a part of the answer.
    """
    if any(message.get("weight", 1) != 1 or "masked" in message for message in answer):
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place}: a message of an answer has a weight, but whole answers are compared",
            "drop the weight",
        )
    messages = [_clean(message, reasoning) for message in [*prompt, *answer]]
    try:
        template = template_of(tokenizer, tools)
        messages = _folded(template, messages)
        text = template.text(messages, tools, prompt=not answer)
        missing = left_out(template, messages, tools, text, first=len(prompt)) if answer else None
    except (TemplateError, TypeError) as error:
        raise _refused(place, error) from error
    if missing is not None:
        raise _lost(place, missing)
    return text


@dataclass(frozen=True)
class ChatRenderer:
    """Render rows with a tokenizer's template, or its training copy that marks the assistant's tokens.

    Args:
        tokenizer: A tokenizer with a chat template.
        assistant_only: True to train only on the assistant's turns, and on other turns with ``weight: 1``. Messages
            with ``weight: 0`` are never trained on.
        mask_history: True to train only on the assistant's last turn.
        reasoning: ``drop`` and ``off`` leave ``reasoning_content`` out of the text; with ``off``, an empty thought that
            the template writes in its place is not trained on.
    """

    tokenizer: Any
    assistant_only: bool = True
    mask_history: bool = False
    reasoning: Reasoning = "learn"

    def render(self, row: dict[str, Any], place: str) -> RenderedConversation:
        """Render a row with ``messages`` and optional ``tools``; errors name it ``place``.

        Raises:
            GymError: ``DATA_INVALID`` naming the row if the template refuses it or omits a part of it, or if the
                assistant's text cannot be located.
        """
        messages = [_clean(message, self.reasoning) for message in row["messages"]]
        silent = _silent(row["messages"], place, prompts_too=not self.assistant_only)
        try:
            return self._render(messages, row, silent, place)
        except (
            TemplateError,
            TypeError,
        ) as error:  # TypeError if the template concatenates a value that is not text
            raise _refused(place, error) from error
        except UnclearTurnsError as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: the chat template rewrites earlier turns, so the assistant's text cannot be located",
                "set mask_history: true to train only on the last answer, use a chat_template with {% generation %} "
                "marks, or set assistant_only_loss: false",
            ) from error

    def _render(
        self, messages: list[Message], row: dict[str, Any], silent: set[int], place: str
    ) -> RenderedConversation:
        given, tools = row["messages"], row.get("tools") or None
        turns = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
        if self.mask_history:
            silent = silent | (turns - {max(turns, default=0)})
        template = template_of(self.tokenizer, tools)
        own = has_marks(template.source)
        counterpart = None if own else training_template(template.source)
        if counterpart is not None:
            template = replace(template, source=counterpart)
        template, text = _showing(template, messages, tools, place)
        messages = _folded(template, messages)
        masked = masked_spans(template, text, messages, tools, given)
        if not self.assistant_only and not silent:
            return RenderedConversation(text, without([(0, len(text))], masked))
        ends = row.get("train_on_eos", "turn") if self.assistant_only else "turn"
        selected = turns - silent if self.assistant_only else silent
        others = self._other_turns(given, ends)
        if own:
            text, spans_of = own_marks(template, messages, tools, self.ends)
        elif counterpart is not None:
            text, spans_of = trimmed_marks(template, messages, tools, self.ends)
        else:
            located = turns if others else selected
            text, spans_of = by_prefix(template, messages, tools, located, self.ends)
        if self.reasoning == "off" and self.assistant_only:
            spans_of = {turn: _after_empty_thoughts(text, spans) for turn, spans in spans_of.items()}
        spans = [span for turn in sorted(selected) for span in spans_of.get(turn, ())]
        if not self.assistant_only:
            spans = _between(spans, len(text))
        elif others or ends != "turn":
            for turn in others:
                content = str(messages[turn].get("content") or "")
                spans_of[turn] = [text_span(template, text, messages, tools, turn, content)]
            selected |= {turn for turn in others if given[turn].get("weight") == 1}
            spans = self._with_ends(text, spans_of, selected, turns, ends)
        return RenderedConversation(text, without(spans, masked))

    def _with_ends(
        self, text: str, spans_of: dict[int, list[Span]], selected: set[int], turns: set[int], ends: str
    ) -> list[Span]:
        """Return the spans of the ``selected`` turns with the end tokens that ``train_on_eos`` selects.

        The spans of the assistant's ``turns`` include their end tokens; those of other turns are followed by them.
        """
        closed = {turn: ends_of(text, spans, self.ends) for turn, spans in spans_of.items() if turn in turns}
        starts = [start for end_spans in closed.values() for start, _ in end_spans]
        tokens = {token for token in self.ends if token and any(text.startswith(token, at) for at in starts)}
        closed |= {turn: end_after(text, spans_of[turn][-1][1], tokens) for turn in spans_of.keys() - turns}
        every = sorted(end for end_spans in closed.values() for end in end_spans)
        at = {"turn": selected, "all": set(closed), "last": {max(selected, default=-1)}, "none": set()}[ends]
        spans = without((span for turn in selected for span in spans_of.get(turn, ())), every)
        return spans + [end for turn in at for end in closed.get(turn, ())]

    def _other_turns(self, given: Sequence[Message], ends: str) -> set[int]:
        """Return the turns of other roles that are trained on, or whose end token is."""
        if not self.assistant_only or self.mask_history:
            return set()
        others = {number for number, message in enumerate(given) if message["role"] != "assistant"}
        return others if ends == "all" else {number for number in others if given[number].get("weight") == 1}

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The tokens that may end a turn."""
        return tuple(
            {*self.tokenizer.all_special_tokens, *map(str, self.tokenizer.added_tokens_decoder.values())}
        )


def _clean(message: Message, reasoning: Reasoning) -> Message:
    """Normalise a message for templates: reasoning under one key, without ``weight`` and ``masked``."""
    thought = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    cleaned = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("weight", "masked") and key not in REASONING_KEYS
    }
    if thought is not None and reasoning == "learn":
        cleaned["reasoning_content"] = thought
    return cleaned


def _after_empty_thoughts(text: str, spans: Sequence[Span]) -> list[Span]:
    """Move the start of each span past an empty thought."""
    thoughts = [(_EMPTY_THOUGHT.match(text, start, end), start, end) for start, end in spans]
    return [(thought.end() if thought else start, end) for thought, start, end in thoughts]


def _silent(messages: Sequence[Message], place: str, *, prompts_too: bool) -> set[int]:
    """Return the indices of the assistant's messages that are not trained on."""
    numbers = set()
    for number, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: a message has weight {weight!r}",
                "a message's weight is 1 (trained on) or 0 (not trained on); data: weight repeats whole sources",
            )
        if weight == 0 and message["role"] == "assistant":
            numbers.add(number)
        elif weight == 0 and prompts_too:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: a message of the {message['role']} role has weight 0, but prompts are trained on too",
                "remove assistant_only_loss and train_on_prompt, or drop the weight",
            )
    return numbers


def _showing(template: Template, messages: list[Message], tools: Any, place: str) -> tuple[Template, str]:
    """Return the template, changed if necessary so that it renders the whole row, and the rendered text."""
    missing = None
    for candidate in (template, showing_history(template)):
        turns = _folded(candidate, messages)
        text = candidate.text(turns, tools)
        missing = left_out(candidate, turns, tools, text)
        if missing is None:
            return candidate, text
    raise _lost(place, str(missing))


def _refused(place: str, error: Exception) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{place}: the model's chat template rejects it: {error}",
        "change or drop the row, or set chat_template to one that accepts it (the model's own may support tools)",
    )


def _lost(place: str, missing: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{place} {missing}, but the model's chat template leaves {'them' if missing in _TOOLS else 'it'} out",
        _REMEDY.get(missing, "use a model whose chat template supports it, or drop the row"),
    )


def _folded(template: Template, messages: list[Message]) -> list[Message]:
    """Put reasoning into the answer, for templates that handle ``</think>`` but read no key for it (DeepSeek)."""
    if "think>" not in template.source or _READS_REASONING.search(template.source):
        return messages
    folded = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        if message["role"] == "assistant" and "reasoning_content" in message:
            thought, answer = message["reasoning_content"], message.get("content", "")
            rest["content"] = f"{THINK}{thought}{END_THINK}\n\n{answer}"
        folded.append(rest)
    return folded


def _between(spans: list[Span], length: int) -> list[Span]:
    """Return the text outside ``spans``."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_OTHER = "something-else-7c1f"


def left_out(
    template: Template, messages: list[Message], tools: Any, text: str, *, first: int = 0
) -> str | None:
    """Find a part of the conversation that the rendered ``text`` lacks; some templates drop tools or reasoning.

    Args:
        text: The template's rendering of ``messages``.
        first: Index of the first message to check.

    Returns:
        The missing part (``has tools``, ``calls tools``, ``has reasoning``, ...), or None if nothing is missing.
    """
    if tools and text == template.text(messages):
        return "has tools"
    for number, message in enumerate(messages[first:], first):
        for part, changed in _parts(message, text):
            if _text(template, [*messages[:number], changed, *messages[number + 1 :]], tools) == text:
                return part
        thought = _THOUGHT.match(message["content"]) if isinstance(message.get("content"), str) else None
        if message["role"] == "assistant" and thought and thought.group(1).strip() not in text:
            return "has reasoning"
    return None


def _text(template: Template, messages: list[Message], tools: Any) -> str | None:
    """Return the rendered text; None if the template refuses, which proves that it reads the changed part."""
    try:
        return template.text(messages, tools)
    except (TemplateError, TypeError):
        return None


def _parts(message: Message, text: str) -> Iterator[tuple[str, Message]]:
    """Yield each part of a message that may be missing, and the message with that part replaced."""
    if message["role"] == "assistant" and message.get("reasoning_content"):
        yield "has reasoning", {**message, "reasoning_content": _OTHER}
    calls = message.get("tool_calls") or ()
    for number in range(len(calls)):
        fewer = [*calls[:number], *calls[number + 1 :]]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        yield "calls tools", {**rest, "tool_calls": fewer} if fewer else rest
    content = message.get("content")
    if isinstance(content, str) and content.strip() and content.strip() not in text:
        yield f"has a message of the {message['role']} role", {**message, "content": _OTHER}
