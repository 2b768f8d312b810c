"""Tasks on strings that gym-nano is pre-trained on: copy, reverse, sort, upper, lower, and so on."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.registry import task

_MIXED = string.ascii_letters + string.digits + " .,!?'-"


def letters(rng: random.Random, low: int, high: int, alphabet: str = string.ascii_lowercase) -> str:
    """A random string of ``low`` to ``high`` characters."""
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


@task("copy", "repeat the text: 'copy: Ab 3!' -> 'Ab 3!'")
def copy(rng: random.Random) -> tuple[str, str]:
    alphabet = rng.choice((string.ascii_lowercase, string.ascii_letters, _MIXED))
    text = letters(rng, 2, 10, alphabet).strip() or "a"
    return f"copy: {text}", text


@task("reverse", "the letters backwards: 'reverse: abc' -> 'cba'")
def reverse(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 8)
    return f"reverse: {text}", text[::-1]


@task("sort", "the letters in alphabetical order: 'sort: cab' -> 'abc'")
def sort(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 6)
    return f"sort: {text}", "".join(sorted(text))


@task("upper", "upper case: 'upper: abC' -> 'ABC'")
def upper(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 9, rng.choice((string.ascii_lowercase, string.ascii_letters)))
    return f"upper: {text}", text.upper()


@task("lower", "lower case: 'lower: ABc' -> 'abc'")
def lower(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 9, rng.choice((string.ascii_uppercase, string.ascii_letters)))
    return f"lower: {text}", text.lower()


@task("first", "the first letter of each word: 'first: cat dog' -> 'cd'")
def first(rng: random.Random) -> tuple[str, str]:
    words = [letters(rng, 2, 4) for _ in range(rng.randint(2, 4))]
    return f"first: {' '.join(words)}", "".join(word[0] for word in words)


@task("count", "how often a letter occurs: 'count a: banana' -> '3'")
def count(rng: random.Random) -> tuple[str, str]:
    wanted = rng.choice(string.ascii_lowercase)
    others = rng.sample(string.ascii_lowercase, 3)
    text = letters(rng, 2, 6, wanted * 3 + "".join(others))
    return f"count {wanted}: {text}", str(text.count(wanted))


@task("length", "how many letters: 'length: abcd' -> '4'")
def length(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 1, 9)
    return f"length: {text}", str(len(text))
