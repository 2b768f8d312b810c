"""Participation: no update is scored; the pool is split among all who took part."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_fed.soup.contribution import ContributionMethod, Game, Scores


class Participation(ContributionMethod):
    """Zero for everyone, for no evaluation: the pool is split among those who took part."""

    name: ClassVar[str] = "participation"
    measures: ClassVar[bool] = False

    def score(self, game: Game) -> Scores:
        return Scores(self.name, np.zeros(game.n), 0, "exact")
