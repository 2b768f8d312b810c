"""A bound on ``multipleOf`` in the schemas that an answer is held to.

The automaton of the multiples of n has n states. Compiling one of a million takes a minute and gigabytes, from a
request of fifty characters. Where several hold at once, their least common multiple counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.refusals import RequestError

MAX_MULTIPLE = 50_000
"""Without zeros at its end: a thousandth, and a million, are as simple as one."""

_NAME, _INLINE = "multipleOf", "%json"


def require_small_multiples(held_to: Grammar | None, field: str, name: str) -> None:
    """Refuse what would take long to compile.

    Args:
        held_to: Of the request.
        field: To blame.
        name: The code of the refusal.

    Raises:
        RequestError: Where the multiples of a schema are too large.
    """
    together = 1
    for value in _multiples(_schemas(held_to)):
        together = math.lcm(together, value)
        if together > MAX_MULTIPLE:
            raise RequestError(
                f"field {field!r}: {_NAME} cannot be enforced where the least common multiple of all of them, without "
                f"zeros at its end, is over {MAX_MULTIPLE:,}",
                param=field,
                name=name,
                hint="leave it out, and check the number afterwards",
            )


def _schemas(held_to: Grammar | None) -> list[Any]:
    """What is JSON in it; what cannot be read is left for the compiler to refuse."""
    if held_to is None or held_to.kind in ("regex", "choice"):
        return []
    text, decoder, found = held_to.text, json.JSONDecoder(), []
    starts = [0] if held_to.kind != "grammar" else _after(text, _INLINE)
    for start in starts:
        try:
            found.append(decoder.raw_decode(text, start)[0])
        except (ValueError, RecursionError):
            continue
    return found


def _after(text: str, word: str) -> list[int]:
    """Where something follows a word."""
    found, at = [], text.find(word)
    while at >= 0:
        start = at + len(word)
        found.append(start + len(text[start:]) - len(text[start:].lstrip()))
        at = text.find(word, start)
    return found


def _multiples(left: list[Any]) -> Iterator[int]:
    """Of all depths."""
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            number = value.get(_NAME)
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
                yield min(int(digits[:20] or 1), MAX_MULTIPLE + 1)
