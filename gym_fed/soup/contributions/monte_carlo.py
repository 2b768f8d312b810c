"""Shapley values from sampled permutations, truncated when the remaining updates add nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores, Vector


class MonteCarloConfig(StrictModel):
    """Settings of ``monte_carlo``."""

    budget: int = Field(default=200, ge=1)
    """Number of evaluations after which no further order begins. The first pair of orders (2n - 1 evaluations) always
    finishes."""

    tolerance: float = Field(default=0.02, ge=0)
    """Sampling ends when the largest standard error is below this share of the largest score's magnitude."""

    truncation: float = Field(default=0.0, ge=0)
    """An order is truncated when its value is within this share of the full coalition's value; 0 never truncates."""

    seed: int = Field(default=0, ge=0)
    """Seed of the permutations."""


class MonteCarlo(ContributionMethod):
    """Monte Carlo Shapley values.

    Ghorbani and Zou 2019, "Data Shapley: Equitable Valuation of Data for Machine Learning", alg. 1.

    Orders are drawn in pairs, each followed by its reverse (Mitchell et al. 2022, "Sampling Permutations for Shapley
    Value Estimation", sec. 4.1): each of any two updates comes first once, so one pair gives the exact scores of a
    quadratic game. Standard errors are those of the pairs' means; for a single pair they are infinite.
    """

    name: ClassVar[str] = "monte_carlo"
    Config: ClassVar[type[StrictModel]] = MonteCarloConfig

    config: MonteCarloConfig

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        generator = np.random.default_rng(self.config.seed)
        pairs: list[Vector] = []
        while True:
            order = generator.permutation(game.n).tolist()
            forward, backward = (
                marginals(counted, each, self.config.truncation) for each in (order, order[::-1])
            )
            pairs.append((forward + backward) / 2)
            parts = np.mean(pairs, axis=0)
            errors = standard_errors([pair.sum(axis=1) for pair in pairs])
            if float(errors.max()) <= self.config.tolerance * float(np.abs(parts.sum(axis=1)).max()):
                return counted.scores(self, parts, "tolerance", errors)
            if counted.evaluations >= self.config.budget or len(pairs) >= self.config.budget:
                return counted.scores(self, parts, "budget", errors)


def marginals(counted: CountedGame, order: list[int], truncation: float) -> Vector:
    """Return marginal values ``[n, k]`` in this order, truncated within ``truncation`` of the total value."""
    whole = counted.value(counted.everyone)
    added = np.zeros((counted.n, len(counted.block_weights)))
    coalition: frozenset[int] = frozenset()
    for i in order:
        before = counted.parts(coalition)
        if abs(whole - float(before.sum())) < truncation * abs(whole):
            break
        coalition |= {i}
        added[i] = counted.parts(coalition) - before
    return added


def standard_errors(samples: list[Vector]) -> Vector:
    """Return the standard errors of the mean of independent ``[n]`` samples; infinite for fewer than two."""
    if len(samples) < 2:
        return np.full(len(samples[0]), np.inf)
    deviations: Vector = np.std(samples, axis=0, ddof=1)
    errors: Vector = deviations / np.sqrt(len(samples))
    return errors
