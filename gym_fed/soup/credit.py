"""Credits, reputations and confidence bounds: the pay for a round's updates.

The score of one update in one round is noisy: on 200 held-out rows its error is often as large as the score. Therefore
scores are summed over rounds before they are paid. With B_i the summed scores of contributor i, G the gain of all
rounds, and L its lower confidence bound, contributor i is due::

    price * min(1, L / sum_j B_j) * B_i - earned_i      if B_i is above chance, else nothing

A smaller budget first pays those with the fewest credits per nat, so that credits are proportional to summed scores as
far as possible. All rounds together never pay more than ``price * L``, and a harmful round reduces later payments. The
scores of noise cancel out and stay at chance level. (This project.)

A gain is a ratio: nats saved over tokens. Its standard error follows from linearisation (Cochran 1977, "Sampling
Techniques", sec. 2.11): with d_k the contribution of block k to the gain G and w_k its share of the tokens, the
residuals ``d_k - G w_k`` are independent, so that the variance is ``K / (K - 1) * sum_k (d_k - G w_k)^2``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BEYOND_CHANCE = 3.0
"""Threshold for summed scores, in standard deviations of the scores of random directions. In 50 rounds, two of fourteen
contributors, who sent noise, got at most 1.1% of the credits at a threshold of 1, 0.9% at 2 and 0.6% at 3
(benchmarks/pay.py, sixteen seeds other than those reported); honest contributors lost nothing."""


@dataclass(frozen=True)
class RunningScore:
    """The summed score of one contributor's updates, or of all rounds, on the same held-out rows.

    Attributes:
        parts: ``[k]`` nats of held-out loss saved, by block of rows.
        chance: Variance of the score of random directions of the same sizes.
        earned: Credits paid for it so far.
    """

    parts: Vector
    chance: float = 0.0
    earned: int = 0

    @property
    def brought(self) -> float:
        """The summed score in nats."""
        return float(self.parts.sum())

    @property
    def is_work(self) -> bool:
        """True if the score exceeds the chance level."""
        return self.brought > BEYOND_CHANCE * math.sqrt(self.chance)

    def error(self, block_weights: Vector) -> float:
        """Return the standard error of ``brought``."""
        return float(standard_error(self.parts, block_weights))

    def with_round(self, parts: Vector, chance: float = 0.0) -> RunningScore:
        """Return the score with one more round added; ``chance`` is the standard deviation in that round."""
        return replace(self, parts=self.parts + parts, chance=self.chance + chance**2)


def certain_gain(run: RunningScore, block_weights: Vector) -> float:
    """Return the lower confidence bound of the gain of all rounds in nats, or 0 if it is negative."""
    return max(0.0, lower_bound(run.parts, block_weights))


def pay_by_score(
    running_scores: Mapping[str, RunningScore],
    run: RunningScore,
    block_weights: Vector,
    present: Collection[str],
    price: float,
    pot: int,
) -> dict[str, int]:
    """Compute the credits of one round for each contributor in ``present``.

    Args:
        running_scores: Running scores of all contributors so far, including this round.
        run: Gain of all rounds, including this one, and the credits paid for it.
        block_weights: ``[k]`` shares of the held-out tokens.
        present: Contributors with an update in the round.
        price: Credits per nat.
        pot: Credits available to pay out.
    """
    gained = certain_gain(run, block_weights)
    brought = {who: score.brought if score.is_work else 0.0 for who, score in running_scores.items()}
    total = sum(brought.values())
    if total <= 0.0:
        return dict.fromkeys(present, 0)
    each = price * min(1.0, gained / total)
    due = {who: max(0.0, each * brought[who] - running_scores[who].earned) for who in present}
    budget = max(0, min(pot, whole(price * gained) - run.earned, whole(sum(due.values()))))
    earned = {who: float(running_scores[who].earned) for who in present}
    level = min(each, _level(budget, {who: brought[who] for who in present}, earned))
    return split_pool(budget, {who: max(0.0, level * brought[who] - earned[who]) for who in present})


def _level(budget: float, brought: Mapping[str, float], earned: Mapping[str, float]) -> float:
    """Return the level in credits per nat to which a budget raises contributors, starting with the least paid."""
    level, nats, paid = 0.0, 0.0, 0.0
    for who in sorted(
        (who for who in brought if brought[who] > 0.0), key=lambda who: earned[who] / brought[who]
    ):
        if nats and level <= earned[who] / brought[who]:
            break
        nats, paid = nats + brought[who], paid + earned[who]
        level = (budget + paid) / nats
    return level


def divisors_as_one(
    scores: Mapping[str, float], groups: Collection[Collection[str]], work: Collection[str]
) -> dict[str, int]:
    """Compute the score divisors that make each group count as one contributor.

    Members in ``work`` share the mean of their scores. The other positive scores are divided by the number of positive
    scores in the group. A score of zero or less is not divided, so that nobody can lower another's pay with it.

    Args:
        scores: Scores in nats by contributor.
        groups: Disjoint groups of two or more contributors.
        work: Contributors whose scores exceed chance.
    """
    divisors = dict.fromkeys(scores, 1)
    for group in groups:
        positive = [who for who in group if scores[who] > 0.0]
        counted = [who for who in positive if who in work]
        divisors |= dict.fromkeys(positive, len(positive)) | dict.fromkeys(counted, len(counted))
    return divisors


def divided(parts: Mapping[str, Vector], divisors: Mapping[str, int]) -> dict[str, Vector]:
    """Divide scores, and multiply all by one factor that preserves the sum of the positive ones.

    A group's members took weight from other contributors in the soup, and the factor returns it. Negative scores are
    excluded from the sum, since a sum near zero would make the factor arbitrarily large.

    Args:
        parts: ``[k]`` scores by contributor.
        divisors: Divisors by contributor.
    """
    shared = {who: score / divisors[who] for who, score in parts.items()}
    before, after = (sum(max(0.0, float(score.sum())) for score in some.values()) for some in (parts, shared))
    factor = before / after if after > 0.0 else 1.0
    return {who: factor * score for who, score in shared.items()}


Vector: TypeAlias = "NDArray[np.float64]"

CONFIDENCE = 0.95
"""One-sided confidence level."""


def standard_error(parts: Vector, block_weights: Vector) -> Vector:
    """Compute standard errors of gains.

    Args:
        parts: ``[..., k]`` contribution of each block of held-out rows to each gain.
        block_weights: ``[k]`` shares of the held-out tokens.

    Returns:
        ``[...]`` standard errors; infinite for fewer than two blocks.
    """
    blocks = len(block_weights)
    if blocks < 2:
        return np.full(parts.shape[:-1], np.inf)
    residuals = parts - parts.sum(axis=-1, keepdims=True) * block_weights
    return np.asarray(np.sqrt(blocks / (blocks - 1) * (residuals**2).sum(axis=-1)))


def lower_bound(parts: Vector, block_weights: Vector) -> float:
    """Return the lower confidence bound of a gain at ``CONFIDENCE``; minus infinity for fewer than two blocks.

    Args:
        parts: ``[k]`` contribution of each block to the gain.
        block_weights: ``[k]`` shares of the held-out tokens.
    """
    if len(block_weights) < 2:
        return -math.inf
    error = float(standard_error(parts, block_weights))
    return float(parts.sum()) - student_quantile(len(block_weights) - 1) * error


def student_quantile(freedom: int) -> float:
    """Return the ``CONFIDENCE`` quantile of Student's t, to 1% (Abramowitz and Stegun 1964, 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * (CONFIDENCE - 0.5))
    if freedom == 2:
        centred = 2 * CONFIDENCE - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(CONFIDENCE)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


DIGITS = 6
"""Reputations are rounded to this many decimals, so that everybody who replays the ledger gets the same values."""


class Outcome(StrEnum):
    """A contributor's outcome in a round."""

    POSITIVE = "positive"
    NOTHING = "nothing"  # merged, but without a measurable gain
    REJECTED = "rejected"
    CHEATING = "cheating"


@dataclass(frozen=True)
class Reputation:
    """A reputation in [0, 1] as of version ``height``; absence is counted from there."""

    value: float
    height: int


NEW = Reputation(0.0, 0)


def before(known: Reputation, height: int, absence: float) -> float:
    """Return a contributor's reputation at the start of the round that creates version ``height``.

    Args:
        known: Reputation after the last round in which they sent an update.
        height: Height of the new version, above ``known.height``.
        absence: Factor per version created without them.
    """
    missed = max(0, height - known.height - 1)
    return round(known.value * absence**missed, DIGITS)


def after(value: float, outcome: Outcome, up: float, rejected: float, cheating: float) -> float:
    """Return the reputation after a round: ``r + up (1 - r)`` for a positive outcome, otherwise scaled by a factor."""
    moved = {
        Outcome.POSITIVE: value + up * (1.0 - value),
        Outcome.NOTHING: value,
        Outcome.REJECTED: value * rejected,
        Outcome.CHEATING: value * cheating,
    }[outcome]
    return round(moved, DIGITS)


def whole(credits: float) -> int:
    """Round down to whole credits; a float within rounding error of a whole number counts as that number."""
    return math.floor(credits + 1e-6)


def split_pool(pool: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Split whole credits in proportion to shares, by largest remainders (ties by name); the total is preserved.

    Args:
        pool: Whole credits to pay out.
        shares: Shares of at least 0 each; if all are 0, nothing is paid out.
    """
    total = sum(Fraction(share) for share in shares.values())
    if total <= 0:
        return {name: 0 for name in shares}
    exact = {name: pool * Fraction(share) / total for name, share in shares.items()}
    amounts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (amounts[name] - exact[name], name))
    for name in by_remainder[: pool - sum(amounts.values())]:
        amounts[name] += 1
    return amounts
