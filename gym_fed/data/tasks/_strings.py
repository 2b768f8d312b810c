"""Tasks on strings that gym-nano is pre-trained on: copy, reverse, sort, upper, lower, and so on."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks._made import letters, task

_MIXED = string.ascii_letters + string.digits + " .,!?'-"


@task("copy", "repeat the text: 'copy: Ab 3!' -> 'Ab 3!'", "base")
def copy(rng: random.Random) -> tuple[str, str]:
    alphabet = rng.choice((string.ascii_lowercase, string.ascii_letters, _MIXED))
    text = letters(rng, 2, 10, alphabet).strip() or "a"
    return f"copy: {text}", text


@task("reverse", "the letters backwards: 'reverse: abc' -> 'cba'", "base")
def reverse(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 8)
    return f"reverse: {text}", text[::-1]


@task("sort", "the letters in alphabetical order: 'sort: cab' -> 'abc'", "base")
def sort(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 6)
    return f"sort: {text}", "".join(sorted(text))


@task("upper", "upper case: 'upper: abC' -> 'ABC'", "base")
def upper(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 9, rng.choice((string.ascii_lowercase, string.ascii_letters)))
    return f"upper: {text}", text.upper()


@task("lower", "lower case: 'lower: ABc' -> 'abc'", "base")
def lower(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 9, rng.choice((string.ascii_uppercase, string.ascii_letters)))
    return f"lower: {text}", text.lower()


@task("first", "the first letter of each word: 'first: cat dog' -> 'cd'", "base")
def first(rng: random.Random) -> tuple[str, str]:
    words = [letters(rng, 2, 4) for _ in range(rng.randint(2, 4))]
    return f"first: {' '.join(words)}", "".join(word[0] for word in words)


@task("count", "how often a letter occurs: 'count a: banana' -> '3'", "base")
def count(rng: random.Random) -> tuple[str, str]:
    wanted = rng.choice(string.ascii_lowercase)
    others = rng.sample(string.ascii_lowercase, 3)
    text = letters(rng, 2, 6, wanted * 3 + "".join(others))
    return f"count {wanted}: {text}", str(text.count(wanted))


@task("length", "how many letters: 'length: abcd' -> '4'", "base")
def length(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 1, 9)
    return f"length: {text}", str(len(text))
