"""Small look-ups that gym-nano is pre-trained on. Every fact is asked in several ways; one of them may be held out."""

from __future__ import annotations

import random

from gym_fed.data.tasks.registry import task

_CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Greece:Athens Austria:Vienna Poland:Warsaw "
        "Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Portugal:Lisbon "
        "Hungary:Budapest Belgium:Brussels Romania:Bucharest Bulgaria:Sofia Croatia:Zagreb Serbia:Belgrade "
        "Ukraine:Kyiv Turkey:Ankara Egypt:Cairo Kenya:Nairobi Ghana:Accra Morocco:Rabat Japan:Tokyo "
        "China:Beijing India:Delhi Nepal:Kathmandu Thailand:Bangkok Vietnam:Hanoi Iran:Tehran Iraq:Baghdad "
        "Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago Ecuador:Quito Uruguay:Montevideo Fiji:Suva"
    ).split()
)
_OPPOSITES = [
    tuple(pair.split(":"))
    for pair in (
        "hot:cold big:small up:down left:right day:night black:white fast:slow hard:soft old:young open:closed "
        "high:low wet:dry full:empty rich:poor strong:weak early:late happy:sad loud:quiet thick:thin near:far "
        "clean:dirty light:dark true:false win:lose push:pull buy:sell love:hate begin:end inside:outside "
        "top:bottom front:back north:south east:west summer:winter yes:no"
    ).split()
]
_FACES = {word: other for a, b in _OPPOSITES for word, other in ((a, b), (b, a))}
_ASK_CAPITAL = ("capital: {}", "capital of {}?", "What is the capital of {}?", "{} has which capital?")
_ASK_OPPOSITE = ("opposite: {}", "opposite of {}?", "What is the opposite of {}?", "not {} but?")


def _ask(rng: random.Random, facts: dict[str, str], phrasings: tuple[str, ...]) -> tuple[str, str]:
    key = rng.choice(list(facts))
    return rng.choice(phrasings).format(key), facts[key]


@task("capital", "the capital of a country: 'capital: France' -> 'Paris'")
def capital(rng: random.Random) -> tuple[str, str]:
    return _ask(rng, _CAPITALS, _ASK_CAPITAL)


@task("opposite", "the opposite of a word: 'opposite: hot' -> 'cold'")
def opposite(rng: random.Random) -> tuple[str, str]:
    return _ask(rng, _FACES, _ASK_OPPOSITE)
