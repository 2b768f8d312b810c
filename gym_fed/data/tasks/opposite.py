"""The task `opposite`: the opposite of a word, asked in many ways."""

from __future__ import annotations

import random

from gym_fed.data.tasks._facts import ask, pairs
from gym_fed.data.tasks.base import Task

_PAIRS = pairs("""
hot:cold big:small up:down left:right day:night black:white fast:slow hard:soft old:young open:closed high:low
wet:dry full:empty rich:poor strong:weak early:late happy:sad loud:quiet thick:thin near:far clean:dirty
true:false win:lose push:pull buy:sell love:hate begin:end inside:outside top:bottom north:south east:west
""")
_OPPOSITES = [pair for a, b in _PAIRS for pair in ((a, b), (b, a))]


class Opposite(Task):
    summary = "the opposite of a word, asked in many ways: 'opposite: hot' -> 'cold'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        return ask(rng, _OPPOSITES, ("opposite: {}", "opposite of {}", "the opposite of {}", "{}: opposite"))
