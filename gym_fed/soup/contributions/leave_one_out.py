"""Leave one out: the decrease in value when an update is removed from the round."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores


class LeaveOneOut(ContributionMethod):
    """``v(N) - v(N \\ i)``, at the cost of n + 1 evaluations.

    Two redundant updates each get little, since either one suffices; if the step overshoots, all scores are low.
    """

    name: ClassVar[str] = "leave_one_out"

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        everyone = counted.everyone
        whole = counted.parts(everyone)
        parts = np.array([whole - counted.parts(everyone - {i}) for i in range(game.n)])
        return counted.scores(self, parts, "exact")
