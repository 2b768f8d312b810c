"""Participation: no update is scored, and the pool is split among all participants."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_fed.soup.contribution import ContributionMethod, Game, Scores


class Participation(ContributionMethod):
    """Scores of zero without any evaluation, so that the pool is split among the participants."""

    name: ClassVar[str] = "participation"
    measures: ClassVar[bool] = False

    def score(self, game: Game) -> Scores:
        return Scores(self.name, np.zeros(game.n), 0, "exact")
