"""Credits by score: what each contributor's updates brought so far, limited by what the run certainly gained.

One round's score of one update is noisy: on 200 held-out rows its error is often as large as itself. So scores are
summed over rounds before they are paid. With B_i what contributor i's updates brought so far, G the gain of all rounds,
and L its lower confidence bound, contributor i is due::

    price * min(1, L / sum_j B_j) * B_i - earned_i      where B_i is beyond chance, else nothing

All rounds together never pay more than ``price * L``, a harmful round reduces what later ones pay, and noise, whose
scores cancel, stays within chance. (This project.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gym_fed.soup.credit.certainty import Vector, lower_bound, standard_error
from gym_fed.soup.credit.rewards import split_pool, whole

BEYOND_CHANCE = 3.0
"""Standard deviations of blind directions that summed scores must exceed. In 50 rounds two senders of noise among
fourteen contributors got at most 1.1% of the credits with 1, 0.9% with 2 and 0.6% with 3 (benchmarks/pay.py, sixteen
other seeds than are reported); honest contributors lost nothing by it."""


@dataclass(frozen=True)
class RunningScore:
    """What one contributor's updates, or all rounds, brought on the same held-out rows.

    Attributes:
        parts: ``[k]`` nats of held-out loss by block of rows.
        chance: Variance of what blind directions of the same sizes bring.
        earned: Credits that were paid for it.
    """

    parts: Vector
    chance: float = 0.0
    earned: int = 0

    @property
    def brought(self) -> float:
        """Nats, in all."""
        return float(self.parts.sum())

    @property
    def is_work(self) -> bool:
        """True if it is more than blind directions bring."""
        return self.brought > BEYOND_CHANCE * math.sqrt(self.chance)

    def error(self, block_weights: Vector) -> float:
        """The standard error of ``brought``."""
        return float(standard_error(self.parts, block_weights))

    def with_round(self, parts: Vector, chance: float = 0.0) -> RunningScore:
        """The running score after one more round, ``chance`` being the standard deviation in that round."""
        return replace(self, parts=self.parts + parts, chance=self.chance + chance**2)


def certain_gain(run: RunningScore, block_weights: Vector) -> float:
    """The lower confidence bound of the gain of all rounds, nats; at least 0."""
    return max(0.0, lower_bound(run.parts, block_weights))


def pay_by_score(
    running_scores: Mapping[str, RunningScore],
    run: RunningScore,
    block_weights: Vector,
    present: Collection[str],
    price: float,
    pot: int,
) -> dict[str, int]:
    """Credits of one round for each contributor in ``present``.

    Args:
        running_scores: Of everybody who ever had a score, this round included.
        run: The gain of all rounds, this one included, and the credits that were paid for it.
        block_weights: ``[k]`` shares of the held-out tokens.
        present: Contributors with an update in the round.
        price: Credits per nat.
        pot: Credits that are there.
    """
    gained = certain_gain(run, block_weights)
    brought = {who: one.brought if one.is_work else 0.0 for who, one in running_scores.items()}
    total = sum(brought.values())
    if total <= 0.0:
        return dict.fromkeys(present, 0)
    each = price * min(1.0, gained / total)
    due = {who: max(0.0, each * brought[who] - running_scores[who].earned) for who in present}
    budget = min(pot, whole(price * gained) - run.earned, whole(sum(due.values())))
    return split_pool(max(0, budget), due)


def paid_as_one(parts: Mapping[str, Vector], groups: Collection[Collection[str]]) -> dict[str, Vector]:
    """Scores of a round in which each group counts as one contributor, who has the mean of the members' scores.

    The sum of what helped stays as it was: many keys took weight from the others in the soup, who get it back. Scores
    below zero have no part in that, or a sum near zero would make the factor as large as one likes.

    Args:
        parts: ``[k]`` scores by contributor.
        groups: Two or more contributors each, nobody in two.
    """
    found = dict(parts)
    for group in groups:
        mean = np.mean([parts[who] for who in group], axis=0)
        found |= dict.fromkeys(group, mean / len(group))
    before, after = (sum(max(0.0, float(one.sum())) for one in some.values()) for some in (parts, found))
    factor = before / after if groups and after > 0.0 else 1.0
    return {who: factor * one for who, one in found.items()}
