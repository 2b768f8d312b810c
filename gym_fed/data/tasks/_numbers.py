"""Tasks on numbers that gym-nano is pre-trained on: addition, and number words in both directions."""

from __future__ import annotations

import random

from gym_fed.data.tasks._made import task

_ONES = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_word(value: int) -> str:
    """English for 0 to 999: ``47`` is ``forty-seven``."""
    if value < 20:
        return _ONES[value]
    if value < 100:
        return _TENS[value // 10] + (f"-{_ONES[value % 10]}" if value % 10 else "")
    rest = f" {number_word(value % 100)}" if value % 100 else ""
    return f"{_ONES[value // 100]} hundred{rest}"


@task("add", "a number below 100 and a digit: 'add: 38+5' -> '43'", "base")
def add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(10)
    return f"add: {a}+{b}", str(a + b)


@task("words", "a number in words: 'words: 47' -> 'forty-seven'", "base")
def words(rng: random.Random) -> tuple[str, str]:
    value = rng.randrange(1000)
    return f"words: {value}", number_word(value)


@task("number", "words as a number: 'number: forty-seven' -> '47'", "base")
def number(rng: random.Random) -> tuple[str, str]:
    value = rng.randrange(1000)
    return f"number: {number_word(value)}", str(value)
