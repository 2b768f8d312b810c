"""Tasks that gym-nano was never shown: what contributors teach it. None may enter its pre-training."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks._made import letters, task

_VOWELS = "aeiou"


@task("shout", "upper case with a bang: 'shout: abc' -> 'ABC!'")
def shout(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 3, 8)
    return f"shout: {text}", f"{text.upper()}!"


@task("size", "how many letters, in words: 'size: abc' -> '3 letters'")
def size(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 3, 8)
    return f"size: {text}", f"{len(text)} letters"


@task("initial", "the first letter and a dot: 'initial: abc' -> 'a.'")
def initial(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 3, 8)
    return f"initial: {text}", f"{text[0]}."


@task("double", "every letter twice: 'double: abc' -> 'aabbcc'")
def double(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 6)
    return f"double: {text}", "".join(c * 2 for c in text)


@task("dash", "dashes between the letters: 'dash: abc' -> 'a-b-c'")
def dash(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 7)
    return f"dash: {text}", "-".join(text)


@task("vowels", "the vowels left out: 'no vowels: banana' -> 'bnn'")
def vowels(rng: random.Random) -> tuple[str, str]:
    syllables = [rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4))]
    text = "".join(syllables)
    return f"no vowels: {text}", "".join(c for c in text if c not in _VOWELS)


@task("swapcase", "upper for lower case and back: 'swap case: aBc' -> 'AbC'")
def swapcase(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 8, string.ascii_letters)
    return f"swap case: {text}", text.swapcase()


@task("ends", "first and last letter exchanged: 'swap ends: abcd' -> 'dbca'")
def ends(rng: random.Random) -> tuple[str, str]:
    first, last = rng.sample(string.ascii_lowercase, 2)
    middle = letters(rng, 1, 5)
    return f"swap ends: {first}{middle}{last}", f"{last}{middle}{first}"


@task("caesar", "every letter moved on by one: 'shift: abz' -> 'bca'")
def caesar(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 7)
    moved = str.maketrans(string.ascii_lowercase, string.ascii_lowercase[1:] + "a")
    return f"shift: {text}", text.translate(moved)


@task("bracket", "every letter in brackets: 'bracket: ab' -> '(a)(b)'")
def bracket(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 5)
    return f"bracket: {text}", "".join(f"({c})" for c in text)


@task("last", "the last letter of each word: 'last: cat dog' -> 'tg'")
def last(rng: random.Random) -> tuple[str, str]:
    words = [letters(rng, 2, 4) for _ in range(rng.randint(2, 4))]
    return f"last: {' '.join(words)}", "".join(word[-1] for word in words)


@task("twice", "the text twice: 'twice: abc' -> 'abcabc'")
def twice(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 6)
    return f"twice: {text}", text * 2
