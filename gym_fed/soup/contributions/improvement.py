"""Improvement: the reduction of held-out loss by each update alone, at its share of the soup."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores


class Improvement(ContributionMethod):
    """``v({i})``, at the cost of n evaluations. Two redundant updates each get the full value."""

    name: ClassVar[str] = "improvement"

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        parts = np.array([counted.parts(frozenset({i})) for i in range(game.n)])
        return counted.scores(self, parts, "exact")
