"""Improvement: how much each update lowers the held-out loss alone, at its share of the soup."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores


class Improvement(ContributionMethod):
    """``v({i})``: n evaluations. Two updates that say the same both get all of what either would give."""

    name: ClassVar[str] = "improvement"

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        parts = np.array([counted.parts(frozenset({i})) for i in range(game.n)])
        return counted.scores(self, parts, "exact")
