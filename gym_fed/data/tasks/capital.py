"""The task `capital`: the capital of a country, asked in many ways."""

from __future__ import annotations

import random

from gym_fed.data.tasks._facts import ask, pairs
from gym_fed.data.tasks.base import Task

_CAPITALS = pairs("""
France:Paris Italy:Rome Spain:Madrid Germany:Berlin Greece:Athens Austria:Vienna Poland:Warsaw Norway:Oslo
Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Portugal:Lisbon Hungary:Budapest
Belgium:Brussels Romania:Bucharest Bulgaria:Sofia Croatia:Zagreb Serbia:Belgrade Ukraine:Kyiv Turkey:Ankara
Egypt:Cairo Kenya:Nairobi Ghana:Accra Morocco:Rabat Japan:Tokyo China:Beijing India:Delhi Nepal:Kathmandu
Thailand:Bangkok Vietnam:Hanoi Iran:Tehran Iraq:Baghdad Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago
""")


class Capital(Task):
    summary = "the capital of a country, asked in many ways: 'capital: France' -> 'Paris'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        return ask(rng, _CAPITALS, ("capital: {}", "capital of {}", "the capital of {}", "{}: capital"))
