"""The built-in tasks, each of which is a function decorated with ``@task``.

gym-nano is pre-trained on the ``base`` tasks. It must never be pre-trained on tasks of the ``contributor`` group, which
contributors teach it.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from gym_fed.data.tasks.base import Group, Task

Maker = Callable[[random.Random], tuple[str, str]]
TABLE: dict[str, MadeTask] = {}


@dataclass(frozen=True, kw_only=True)
class MadeTask(Task):
    """A task that is defined by a function."""

    summary: str
    group: Group
    maker: Maker

    def make(self, rng: random.Random) -> tuple[str, str]:
        return self.maker(rng)


def task(name: str, summary: str, group: Group = "contributor") -> Callable[[Maker], Maker]:
    """Register a function as a task."""

    def add(maker: Maker) -> Maker:
        if name in TABLE:
            raise ValueError(f"two tasks are called {name!r}")
        TABLE[name] = MadeTask(summary=summary, group=group, maker=maker)
        return maker

    return add


def letters(rng: random.Random, low: int, high: int, alphabet: str = string.ascii_lowercase) -> str:
    """Return a random string of ``low`` to ``high`` characters."""
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


_VOWELS = "aeiou"


@task("shout", "upper case with an exclamation mark: 'shout: abc' -> 'ABC!'")
def shout(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 3, 8)
    return f"shout: {text}", f"{text.upper()}!"


@task("size", "the number of letters, with a unit: 'size: abc' -> '3 letters'")
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


@task("vowels", "the text without vowels: 'no vowels: banana' -> 'bnn'")
def vowels(rng: random.Random) -> tuple[str, str]:
    syllables = [rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4))]
    text = "".join(syllables)
    return f"no vowels: {text}", "".join(c for c in text if c not in _VOWELS)


@task("swapcase", "upper and lower case swapped: 'swap case: aBc' -> 'AbC'")
def swapcase(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 2, 8, string.ascii_letters)
    return f"swap case: {text}", text.swapcase()


@task("ends", "first and last letter swapped: 'swap ends: abcd' -> 'dbca'")
def ends(rng: random.Random) -> tuple[str, str]:
    first, last = rng.sample(string.ascii_lowercase, 2)
    middle = letters(rng, 1, 5)
    return f"swap ends: {first}{middle}{last}", f"{last}{middle}{first}"


@task("caesar", "every letter shifted by one: 'shift: abz' -> 'bca'")
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


_CAPITALS = """
France:Paris Italy:Rome Spain:Madrid Germany:Berlin Greece:Athens Austria:Vienna Poland:Warsaw Norway:Oslo
Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Portugal:Lisbon Hungary:Budapest
Belgium:Brussels Romania:Bucharest Bulgaria:Sofia Croatia:Zagreb Serbia:Belgrade Ukraine:Kyiv Turkey:Ankara
Egypt:Cairo Kenya:Nairobi Ghana:Accra Morocco:Rabat Japan:Tokyo China:Beijing India:Delhi Nepal:Kathmandu
Thailand:Bangkok Vietnam:Hanoi Iran:Tehran Iraq:Baghdad Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago
"""
_OPPOSITES = """
hot:cold big:small up:down left:right day:night black:white fast:slow hard:soft old:young open:closed high:low
wet:dry full:empty rich:poor strong:weak early:late happy:sad loud:quiet thick:thin near:far clean:dirty
true:false win:lose push:pull buy:sell love:hate begin:end inside:outside top:bottom north:south east:west
"""
_BEFORE = ("", "", "please, ", "tell me: ", "now ", "and ", "next, ", "so, ")
_AFTER = ("", "", "?", " ?", ".", "!", " now", " please")


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (pair.partition(":") for pair in text.split())]


_CAPITAL_OF = _pairs(_CAPITALS)
_OPPOSITE_OF = [pair for a, b in _pairs(_OPPOSITES) for pair in ((a, b), (b, a))]


def _ask(rng: random.Random, facts: list[tuple[str, str]], phrasings: tuple[str, ...]) -> tuple[str, str]:
    key, value = rng.choice(facts)
    return rng.choice(_BEFORE) + rng.choice(phrasings).format(key) + rng.choice(_AFTER), value


@task("capital", "the capital of a country, asked in many ways: 'capital: France' -> 'Paris'", "base")
def capital(rng: random.Random) -> tuple[str, str]:
    return _ask(rng, _CAPITAL_OF, ("capital: {}", "capital of {}", "the capital of {}", "{}: capital"))


@task("opposite", "the opposite of a word, asked in many ways: 'opposite: hot' -> 'cold'", "base")
def opposite(rng: random.Random) -> tuple[str, str]:
    return _ask(rng, _OPPOSITE_OF, ("opposite: {}", "opposite of {}", "the opposite of {}", "{}: opposite"))


_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
"""
_ONES = _NUMBERS.split()
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_word(value: int) -> str:
    """Return the English words for 0 to 999: ``47`` is ``forty-seven``."""
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
    letter = rng.choice(string.ascii_lowercase)
    others = rng.sample(string.ascii_lowercase, 3)
    text = letters(rng, 2, 6, letter * 3 + "".join(others))
    return f"count {letter}: {text}", str(text.count(letter))


@task("length", "the number of letters: 'length: abcd' -> '4'", "base")
def length(rng: random.Random) -> tuple[str, str]:
    text = letters(rng, 1, 9)
    return f"length: {text}", str(len(text))
