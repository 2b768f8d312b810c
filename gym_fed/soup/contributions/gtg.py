"""GTG-Shapley: sampled permutations in which every player leads equally often, truncated early."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores, Vector
from gym_fed.soup.contributions.monte_carlo import marginals, standard_errors


class GtgConfig(StrictModel):
    """Settings of ``gtg``."""

    budget: int = Field(default=200, ge=1)
    """Number of evaluations after which no further turn of n orders begins."""

    round_truncation: float = Field(default=0.0001, ge=0)
    """Loss change in nats up to which every score of the round is zero (between-round truncation)."""

    truncation: float = Field(default=0.01, ge=0)
    """An order is truncated when its value is within this share of the full coalition's value; 0 never truncates."""

    tolerance: float = Field(default=0.05, ge=0)
    """Sampling ends when a turn changes the scores by at most this share of their mean magnitude, on average."""

    seed: int = Field(default=0, ge=0)
    """Seed of the permutations."""


class Gtg(ContributionMethod):
    """Guided truncation gradient Shapley.

    Liu et al. 2022, "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated Learning",
    alg. 1; arXiv:2109.02053.

    Orders are drawn in turns of n, each led by a different player. Convergence is checked after complete turns, so that
    every player has led equally often.
    """

    name: ClassVar[str] = "gtg"
    Config: ClassVar[type[StrictModel]] = GtgConfig

    config: GtgConfig

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        if abs(counted.value(counted.everyone)) <= self.config.round_truncation:
            zeros = np.zeros((game.n, len(counted.block_weights)))
            return counted.scores(self, zeros, "tolerance", zeros[:, 0])
        generator = np.random.default_rng(self.config.seed)
        turns: list[Vector] = []
        earlier: Vector | None = None
        while True:
            turns.append(
                np.mean([self._walk(counted, leader, generator) for leader in range(game.n)], axis=0)
            )
            parts = np.mean(turns, axis=0)
            values, errors = parts.sum(axis=1), standard_errors([turn.sum(axis=1) for turn in turns])
            size = float(np.abs(values).mean())
            if earlier is not None and float(np.abs(values - earlier).mean()) <= self.config.tolerance * size:
                return counted.scores(self, parts, "tolerance", errors)
            if counted.evaluations >= self.config.budget or len(turns) >= self.config.budget:
                return counted.scores(self, parts, "budget", errors)
            earlier = values

    def _walk(self, counted: CountedGame, leader: int, generator: np.random.Generator) -> Vector:
        """Return marginal values ``[n, k]`` in a random order that starts with ``leader``."""
        others = [i for i in range(counted.n) if i != leader]
        order = [leader, *generator.permutation(others).tolist()]
        return marginals(counted, order, self.config.truncation)
