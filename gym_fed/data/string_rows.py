"""Convert rows with plain-string prompts and answers to chat turns, since later prompts are chat turns.

``gym chat``, ``gym api`` and evaluations put a prompt into the tokenizer's chat template. A row trained without the
template would teach answers to prompts that never occur, so string rows get the tokenizer's template if it has one.
``chat_template: none`` removes the template from the tokenizer, in training and in the saved model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gym_fed.core.text import counted
from gym_fed.data.rows import PlacedDict, Row

if TYPE_CHECKING:
    from gym_fed.data.chat_templates.rendering import Template


_ANSWERS = ("completion", "chosen", "rejected")
_WORDS = {
    "turns": "trained as chat turns (chat_template: none keeps them raw)",
    "templated": "trained as given (they already contain the chat template's marks)",
    "raw": "trained raw (without a chat template)",
}
_QUESTION, _ANSWER, _NEXT = "first-question-5d1e", "first-answer-5d1e", "second-question-5d1e"


def is_string_row(row: Row) -> bool:
    """Return True if the row has a prompt, and the prompt and all answers are strings."""
    return isinstance(row.get("prompt"), str) and all(
        isinstance(row[key], str) for key in _ANSWERS if key in row
    )


def as_turns(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Convert string rows to user and assistant turns.

    Rows are unchanged if the tokenizer has no chat template, if they are conversations or ``text``, or if the prompt
    already contains the template's marks (the template was applied before).

    Args:
        tokenizer: A tokenizer or processor.
        rows: Rows of any kind; see ``gym_fed.data.rows``.
    """
    if not getattr(tokenizer, "chat_template", None) or not any(map(is_string_row, rows)):
        return list(rows)
    marks = _marks_of(tokenizer)
    return [_turned(marks, row) if is_string_row(row) else row for row in rows]


def count_forms(tokenizer: Any, rows: Sequence[Row]) -> dict[str, int]:
    """Count the outcome for string rows: ``turns``, ``templated`` (unchanged) or, without a template, ``raw``."""
    strings = [row for row in rows if is_string_row(row)]
    if not strings or not getattr(tokenizer, "chat_template", None):
        counts = {"raw": len(strings)}
    else:
        marks = _marks_of(tokenizer)
        templated = sum(_is_templated(marks, row["prompt"]) for row in strings)
        counts = {"turns": len(strings) - templated, "templated": templated}
    return {form: count for form, count in counts.items() if count}


def forms_in_words(forms: Mapping[str, int]) -> list[str]:
    """Describe ``count_forms`` in sentences."""
    return [
        f"{counted(count, 'row')} of plain strings, {_WORDS[form]}"
        for form, count in forms.items()
        if form in _WORDS
    ]


@dataclass(frozen=True)
class _Marks:
    """Strings that show that a template has been applied to a text.

    Attributes:
        tokens: Special tokens that the template writes around turns.
        openings: Words that a user's turn begins with.
        ends: Tokens that end an answer.
        bos: The BOS token; empty if there is none.
    """

    tokens: tuple[str, ...]
    openings: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str


_KNOWN: WeakKeyDictionary[Any, tuple[tuple[Any, ...], _Marks]] = WeakKeyDictionary()
"""Marks by tokenizer, each with the template that they were read from."""


def _is_templated(marks: _Marks, prompt: str) -> bool:
    return any(token in prompt for token in marks.tokens) or prompt.lstrip().startswith(marks.openings)


def _turned(marks: _Marks, row: Row) -> Row:
    if _is_templated(marks, row["prompt"]):
        return row
    prompt = row["prompt"].removeprefix(marks.bos)  # the template writes its own

    def answer(key: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": _without_end(row[key], marks.ends)}]

    question = [{"role": "user", "content": prompt}]
    rest = {key: value for key, value in row.items() if key not in ("prompt", *_ANSWERS)}
    if "chosen" in row:
        turns = {"prompt": question, "chosen": answer("chosen"), "rejected": answer("rejected")}
    elif "completion" not in row:
        turns = {"prompt": question}
    elif "label" in row:
        turns = {"prompt": question, "completion": answer("completion")}
    else:
        turns = {"messages": [*question, *answer("completion")]}
    return PlacedDict.like({**rest, **turns}, row)


def _without_end(text: str, ends: tuple[str, ...]) -> str:
    """Remove an end token at the end of an answer, since the template adds one."""
    stripped = text.rstrip()
    end = next((end for end in ends if stripped.endswith(end)), None)
    return text if end is None else stripped.removesuffix(end)


def _marks_of(tokenizer: Any) -> _Marks:
    """Collect the marks of a tokenizer's chat template.

    ``added_tokens_decoder`` is built on each read, which takes milliseconds if thousands of tokens were added.
    Therefore the marks are cached for each tokenizer until its template or tokens change.
    """
    from gym_fed.data.chat_templates.rendering import template_of

    template = template_of(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # use the tokenizer of a processor
    special = tuple(getattr(inner, "all_special_tokens", ()))
    state = (template, special, len(inner))
    if (known := _KNOWN.get(inner)) is not None and known[0] == state:
        return known[1]
    added = map(str, getattr(inner, "added_tokens_decoder", {}).values())
    candidates = sorted(token for token in {*special, *added} if len(token) > 2)
    tokens, openings, ends = _marks_in(template, candidates)
    ends = tuple(token for token in (*ends, getattr(inner, "eos_token", None)) if token)
    marks = _Marks(tokens, openings, ends, getattr(inner, "bos_token", None) or "")
    _KNOWN[inner] = state, marks
    return marks


def _marks_in(
    template: Template, candidates: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """List the special tokens, openings and end tokens of the turns that a template writes."""
    from jinja2 import TemplateError

    turns = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    try:
        text = template.text(turns)
    except (TemplateError, TypeError):
        return (), (), ()
    between = text.partition(_ANSWER)[2].partition(_NEXT)[0]
    header = text.partition(_QUESTION)[2].partition(_ANSWER)[0]
    # A prompt may mention <think>, which is not the header of a turn.
    marks = tuple(t for t in candidates if (t in between or t in header) and "think>" not in t)
    ends = tuple(mark for mark in marks if between.lstrip().startswith(mark))
    for mark in marks:
        between = between.replace(mark, "\n")
    words = [line.strip() for line in between.splitlines() if len(line.strip()) > 2]
    # In ``<|im_end|>\n<|im_start|>user\n`` only the tokens are marks, since a prompt may begin with "user".
    opening = tuple(word for word in words if not word.isalnum())
    return marks, opening, ends


def with_system(row: Row, system: str) -> Row:
    """Prepend a system message to a conversation without one; return other rows unchanged."""
    key = "messages" if "messages" in row else "prompt"
    messages = row.get(key)
    if not isinstance(messages, list) or any(message["role"] == "system" for message in messages):
        return row
    return PlacedDict.like({**row, key: [{"role": "system", "content": system}, *messages]}, row)
