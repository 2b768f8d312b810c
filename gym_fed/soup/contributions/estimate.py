"""Shapley values estimated from gradients of the held-out loss along the round's step."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.soup.contribution import ContributionMethod, CountedGame, Game, Scores


class EstimateConfig(StrictModel):
    """Settings of ``estimate``."""

    points: int = Field(default=1, ge=1, le=5)
    """Number of gradients along the step, three evaluations each; raise it for a loss far from quadratic and many small
    updates."""


class Estimate(ContributionMethod):
    """The slope of each update's share, averaged along the path from the base to the round's soup.

    For a quadratic loss with gradient g at the base and any Hessian H, with m the full step,
    ``v(S) = -<g, m_S> - m_S' H m_S / 2`` shares every interaction equally between its two players, so the Shapley value
    is ``-<g + H m / 2, c_i u_i>``: the inner product with the gradient at ``base + m / 2``. No curvature is fitted, and
    the cost does not depend on n. With more points, Gauss-Legendre quadrature gives the path integral of Aumann and
    Shapley 1974, "Values of Non-Atomic Games", which is the Shapley value if no single update makes up most of the
    step. Scores are then adjusted, in proportion to their magnitudes, to sum to the value of the full coalition.
    """

    name: ClassVar[str] = "estimate"
    Config: ClassVar[type[StrictModel]] = EstimateConfig

    config: EstimateConfig

    def score(self, game: Game) -> Scores:
        counted = CountedGame(game)
        places, weights = np.polynomial.legendre.leggauss(self.config.points)
        parts = np.zeros((game.n, len(counted.block_weights)))
        for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
            parts += weight * counted.slopes(np.full(game.n, place))
        missing = counted.parts(counted.everyone) - parts.sum(axis=0)
        size = np.abs(parts.sum(axis=1))
        if size.sum() > 0:
            parts += np.outer(size / size.sum(), missing)
        return counted.scores(self, parts, "model")
