"""Exact Shapley values: the marginal value of an update, averaged over all orders of the updates."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores


class ShapleyConfig(StrictModel):
    """Settings of ``shapley``."""

    max_players: int = Field(default=10, ge=1, le=20)
    """Maximum number of updates in a round; n updates cost 2^n - 1 evaluations."""


class Shapley(ContributionMethod):
    """Exact Shapley values (Shapley 1953, "A Value for n-Person Games"); evaluates every coalition."""

    name: ClassVar[str] = "shapley"
    Config: ClassVar[type[StrictModel]] = ShapleyConfig

    config: ShapleyConfig

    def score(self, game: Game) -> Scores:
        n = game.n
        if n > self.config.max_players:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"exact Shapley values of {n} updates take {2**n - 1} evaluations; max_players is "
                f"{self.config.max_players}",
                "score with monte_carlo, gtg or estimate, or raise max_players",
            )
        counted = CountedGame(game)
        # In binary order, every second coalition extends the one before it, so SoupGame adds one update to its sum.
        table = [counted.parts(frozenset(i for i in range(n) if mask >> i & 1)) for mask in range(1 << n)]
        parts = np.zeros((n, len(counted.block_weights)))
        for i in range(n):
            terms = [
                (table[mask | 1 << i] - table[mask]) / (n * math.comb(n - 1, mask.bit_count()))
                for mask in range(1 << n)
                if not mask >> i & 1
            ]
            parts[i] = [math.fsum(block) for block in np.transpose(terms)]
        return counted.scores(self, parts, "exact")
