"""TRL's prompt and completion: only the completion is learnt; conversations become messages, texts stay two texts."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.answers import PROMPT_KEYS, prompt_and_answers
from gym_fed.data.formats.base import Raw, as_object, with_context


def read(raw: Any) -> Raw:
    """``{"messages"}`` of both, or ``{"prompt": str, "completion": str}``."""
    row = as_object(raw)
    images: list[Any] = []
    prompt, (answer,) = prompt_and_answers(row, ("completion",), images)
    both = (
        {"prompt": prompt, "completion": answer}
        if isinstance(prompt, str)
        else {"messages": [*prompt, *answer]}
    )
    return with_context(row, {**both, **({"images": images} if images else {})}, "completion", *PROMPT_KEYS)
