"""Turns rows whose prompts and answers are plain strings into chat turns, which is how the trained model is prompted.

``gym chat``, ``gym api`` and evaluations put a prompt into the tokenizer's chat template. A row that is trained without
it teaches answers to prompts that never occur, so rows get the template wherever they meet a tokenizer that has one.
``chat_template: none`` takes the template off the tokenizer, for training and for the saved result alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gym_fed.data.rows import PlacedDict, Row

_ANSWERS = ("completion", "chosen", "rejected")
_WORDS = {
    "turns": "trained as chat turns (chat_template: none keeps them raw)",
    "templated": "trained as given (the chat template's marks are in them already)",
    "raw": "trained raw (without a chat template)",
}
_QUESTION, _ANSWER, _NEXT = "first-question-5d1e", "first-answer-5d1e", "second-question-5d1e"


def is_string_row(row: Row) -> bool:
    """Return True if the row has a prompt, and all its answers and the prompt are strings."""
    return isinstance(row.get("prompt"), str) and all(
        isinstance(row[key], str) for key in _ANSWERS if key in row
    )


def as_turns(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Rewrite string rows as a user's turn and the assistant's turns.

    Rows stay as they are where the tokenizer has no chat template, where they are conversations or ``text``, and where
    the prompt already holds the template's own marks (it was templated beforehand).

    Args:
        tokenizer: A tokenizer or processor.
        rows: Rows of any kind; see ``gym_fed.data.rows``.
    """
    if not getattr(tokenizer, "chat_template", None):
        return list(rows)
    return [_turned(tokenizer, row) if is_string_row(row) else row for row in rows]


def count_forms(tokenizer: Any, rows: Sequence[Row]) -> dict[str, int]:
    """Count what string rows become: ``turns``, ``templated`` (left as they are) or, without a template, ``raw``."""
    strings = [row for row in rows if is_string_row(row)]
    if not getattr(tokenizer, "chat_template", None):
        counts = {"raw": len(strings)}
    else:
        templated = sum(is_string_row(row) for row in as_turns(tokenizer, strings))
        counts = {"turns": len(strings) - templated, "templated": templated}
    return {form: count for form, count in counts.items() if count}


def forms_in_words(forms: Mapping[str, int]) -> list[str]:
    """Return the sentences that report ``count_forms``."""
    return [
        f"{count:,} {'row' if count == 1 else 'rows'} of plain strings, {_WORDS[form]}"
        for form, count in forms.items()
        if form in _WORDS
    ]


def _turned(tokenizer: Any, row: Row) -> Row:
    marks, openings, ends = _marks_of(tokenizer)
    prompt = row["prompt"]
    if any(mark in prompt for mark in marks) or prompt.lstrip().startswith(openings):
        return row
    bos = getattr(tokenizer, "bos_token", None)
    if bos and prompt.startswith(bos):
        prompt = prompt[len(bos) :]  # the template writes its own

    def answer(key: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": _without_end(row[key], ends)}]

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
    """Remove an end token that was written by hand, because the template writes it again."""
    stripped = text.rstrip()
    end = next((end for end in ends if stripped.endswith(end)), None)
    return text if end is None else stripped.removesuffix(end)


def _marks_of(tokenizer: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return what shows that a text was templated beforehand.

    Returns:
        The special tokens that the template writes around turns, the words that it opens a user's turn with, and the
        tokens that end an answer.
    """
    from gym_fed.data.chat_templates.rendering import template_of

    template = template_of(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    decoder = getattr(inner, "added_tokens_decoder", {})
    special = {*getattr(inner, "all_special_tokens", ()), *map(str, decoder.values())}
    variables = tuple(sorted((key, str(value)) for key, value in template.variables.items()))
    marks, openings, end = _marks(template.source, variables, tuple(sorted(t for t in special if len(t) > 2)))
    ends = (*end, getattr(inner, "eos_token", None))
    return marks, openings, tuple(token for token in ends if token)


@lru_cache(maxsize=16)
def _marks(
    source: str, variables: tuple[tuple[str, str], ...], special: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    from jinja2 import TemplateError

    from gym_fed.data.chat_templates.rendering import Template

    turns = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    try:
        text = Template(source, dict(variables)).text(turns)
    except (TemplateError, TypeError):
        return (), (), ()
    between = text.partition(_ANSWER)[2].partition(_NEXT)[0]
    header = text.partition(_QUESTION)[2].partition(_ANSWER)[0]
    # A prompt may speak of <think>; it is no header of a turn.
    marks = tuple(t for t in special if (t in between or t in header) and "think>" not in t)
    ends = tuple(mark for mark in marks if between.lstrip().startswith(mark))
    for mark in marks:
        between = between.replace(mark, "\n")
    words = [line.strip() for line in between.splitlines() if len(line.strip()) > 2]
    # Of ``<|im_end|>\n<|im_start|>user\n`` only the tokens are marks: a prompt may well begin with "user".
    opening = tuple(word for word in words if not word.isalnum())
    return marks, opening, ends
