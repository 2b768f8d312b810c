"""Which token ends an answer under a chat template, and which named templates a tokenizer can end."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError

from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.chat_templates.rendering import Message, template_of

_MARK = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>\s]+?｜>|<[a-z]+(?:_[a-z]+)+>|\[/?[A-Z_]{3,}\]")
_ANSWER = "an answer 5d1e"
_TURNS: list[Message] = [
    {"role": "system", "content": "instructions"},
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "another question"},
]
_SUGGESTED = ("chatml", "zephyr", "vicuna", "default")
"""Templates that errors name, most common first."""


def end_and_marks(tokenizer: Any) -> tuple[str | None, list[str]]:
    """The mark that ends an answer (None where the tokenizer's own end token does), and all marks of the template."""
    template = template_of(tokenizer)
    text = None
    for turns in (_TURNS, _TURNS[1:]):
        try:
            text = template.text(turns, prompt=True)
        except (TemplateError, TypeError):
            continue
        break
    if text is None:
        return None, []
    marks = list(dict.fromkeys(_MARK.findall(text)))
    behind = text.partition(_ANSWER)[2].lstrip()
    own = tokenizer.eos_token
    found = None if own and behind.startswith(own) else _MARK.match(behind)
    return (None if found is None else found[0]), marks


def is_token(tokenizer: Any, mark: str) -> bool:
    """True if the tokenizer writes ``mark`` as one token."""
    return tokenizer.convert_tokens_to_ids(mark) not in (None, tokenizer.unk_token_id)


def suggested_templates(tokenizer: Any) -> str:
    """Named templates whose end token the tokenizer has: ``zephyr, vicuna or default``; empty if it can end none."""
    words = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    names = [name for name in _SUGGESTED if _can_end(words, name)]
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _can_end(tokenizer: Any, name: str) -> bool:
    templated = use_chat_template(tokenizer, name)
    end, _ = end_and_marks(templated)
    return bool(templated.eos_token) if end is None else is_token(templated, end)
