"""Choose a model's reasoning parser by rendering a thought with its chat template."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from gym_fed.core.registries import REASONING_PARSERS
from gym_fed.serving.reasoning.base import ReasoningParser, WrittenThought

AUTO, NONE = "auto", "none"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message in which templates expect its thought."""

_WORDS = ("think", *THOUGHT_KEYS)
"""A template without any of these texts is not rendered, so that servers start fast."""

_THOUGHT, _ANSWER = "a thought of a probe", "an answer of a probe"
_QUESTION = {"role": "user", "content": "x"}
_TURN = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(THOUGHT_KEYS, _THOUGHT)}


def reasoning_parser(name: str, tokenizer: Any) -> ReasoningParser | None:
    """Create the reasoning parser of a model.

    Args:
        name: A member of ``REASONING_PARSERS``, ``auto`` to detect it from the chat template, or ``none``.
        tokenizer: The tokenizer; without a chat template, ``auto`` does not find a parser.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown name.
    """
    if name == NONE:
        return None
    written = _written(tokenizer)
    if name != AUTO:
        parser: ReasoningParser = REASONING_PARSERS.type_of(name)(tokenizer, written)
        return parser
    types = [(member, REASONING_PARSERS.type_of(member)) for member in REASONING_PARSERS.usable()]
    types.sort(key=lambda item: (item[1].order, item[0] not in REASONING_PARSERS.own(), item[0]))
    chosen = next((type_ for _, type_ in types if type_.matches(written)), None)
    return None if chosen is None else chosen(tokenizer, written)


def name_of(parser: ReasoningParser | None) -> str:
    """Return the registry name of a parser; ``none`` without one."""
    if parser is None:
        return NONE
    return next(
        (name for name in REASONING_PARSERS.names() if REASONING_PARSERS.type_of(name) is type(parser)), NONE
    )


def _render(tokenizer: Any, rows: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
    """Render messages; None without a template, or if it refuses them."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt))
    except (TemplateError, TypeError, ValueError):  # chats will be refused with the reason
        return None


def _written(tokenizer: Any) -> WrittenThought:
    """Render a question, without and with an answer that has a thought."""
    template = tokenizer.chat_template
    source = "".join(template.values()) if isinstance(template, dict) else template or ""
    if not any(word in source for word in _WORDS):
        return WrittenThought("", source=source)
    prompt = _render(tokenizer, [_QUESTION], prompt=True) or ""
    turn = _render(tokenizer, [_QUESTION, _TURN])
    # A template may end a conversation differently without a generation prompt
    pairs = zip(prompt, _render(tokenizer, [_QUESTION]) or "", strict=False)
    begin = prompt[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    if turn is None or _THOUGHT not in turn or _ANSWER not in turn:
        return WrittenThought(begin, source=source)
    before, _, after = turn.partition(_THOUGHT)
    between, answer, _ = after.partition(_ANSWER)
    if not answer:  # the answer precedes its thought
        return WrittenThought(begin, source=source)
    return WrittenThought(begin, before, between, source)
