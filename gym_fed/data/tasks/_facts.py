"""Small look-ups: each fact is asked in many ways, some of which are held out."""

from __future__ import annotations

import random

_BEFORE = ("", "", "please, ", "tell me: ", "now ", "and ", "next, ", "so, ")
_AFTER = ("", "", "?", " ?", ".", "!", " now", " please")


def pairs(text: str) -> list[tuple[str, str]]:
    """``"a:b c:d"`` as pairs."""
    return [(key, value) for key, _, value in (pair.partition(":") for pair in text.split())]


def ask(rng: random.Random, facts: list[tuple[str, str]], phrasings: tuple[str, ...]) -> tuple[str, str]:
    """One fact, asked in one of the ways."""
    key, value = rng.choice(facts)
    return rng.choice(_BEFORE) + rng.choice(phrasings).format(key) + rng.choice(_AFTER), value
