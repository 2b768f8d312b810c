"""Small look-ups that gym-nano is pre-trained on. Each fact has many prompts; some are held out."""

from __future__ import annotations

import random

from gym_fed.data.tasks._made import task

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
