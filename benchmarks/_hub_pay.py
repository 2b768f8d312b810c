"""The pay of consecutive rounds, with the hub's own split, running scores, reputations and settlements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.settlements import Settlement
from gym_server.rewards.split import MeasuredRound, Split, split

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.soup.contribution import Scores, Vector
from gym_fed.soup.credit import Outcome, RunningScore, after

LUCK = 2.0
"""Score that is attributed to chance, in standard deviations of a random update's score, as on the hub."""


class HubPay:
    """The state that is carried from round to round.

    Args:
        config: The rewards config; scores are measured unless its score is ``participation``.

    Attributes:
        credits: Credits of all rounds by contributor.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self.credits: dict[str, int] = defaultdict(int)
        self._reputations: dict[str, float] = defaultdict(float)
        self._running_scores: dict[str, RunningScore] = {}
        self._run: RunningScore | None = None
        self._shared = 0
        self._settlements: dict[str, Settlement] = {}
        self._carried = 0

    def pay(self, names: Sequence[str], scores: Scores, gain: Vector, similarity: RoundSimilarity) -> Split:
        """Pay a round.

        Args:
            names: Contributors in the order of the scores, which are also the ids of their updates in ``similarity``.
            scores: The measured scores.
            gain: ``[k]`` gain of the soup by block of held-out rows.
            similarity: Similarity of the updates, as on the hub.
        """
        config, threshold = self._config, self._config.together_threshold
        found = split(
            config,
            {who: self._reputations[who] for who in names},
            self._measured(names, scores, gain) if config.measures else None,
            lambda who: self._together(who, similarity),
            carried=self._carried,
            settlements=None if threshold is None else self._settlements,
            comparable=similarity.comparable,
        )
        self._running_scores |= found.running_scores
        self._run, self._shared, self._carried = found.run, found.shared, found.left
        self._settlements |= found.settlements
        how = config.reputation
        for who in names:
            self.credits[who] += found.credits[who]
            outcome = Outcome.POSITIVE if who in found.earning else Outcome.NOTHING
            self._reputations[who] = after(
                self._reputations[who], outcome, how.up, how.rejected, how.cheating
            )
        return found

    def _together(self, who: Collection[str], similarity: RoundSimilarity) -> list[list[str]]:
        threshold = self._config.together_threshold
        return [] if threshold is None else similarity.together(who, threshold)

    def _measured(self, names: Sequence[str], scores: Scores, gain: Vector) -> MeasuredRound:
        chance = np.zeros(len(names)) if scores.chance is None else scores.chance
        chances = dict(zip(names, chance.tolist(), strict=True))
        return MeasuredRound(
            dict(zip(names, scores.parts, strict=True)),
            {who: LUCK * value for who, value in chances.items()},
            chances,
            gain,
            scores.block_weights,
            self._running_scores,
            self._run or RunningScore(0.0 * gain),
            self._shared,  # no evaluations here
        )
