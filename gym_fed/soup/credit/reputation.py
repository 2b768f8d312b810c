"""A contributor's reputation in [0, 1]: it rises with rounds that gained by it, falls with absence and cheating."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DIGITS = 6
"""Reputations are rounded to this grid, so that everybody who follows the ledger has the same ones."""


class Outcome(StrEnum):
    """The outcome of a round for a contributor."""

    POSITIVE = "positive"
    NOTHING = "nothing"  # merged, but it gave nothing that could be measured
    REJECTED = "rejected"
    CHEATING = "cheating"


@dataclass(frozen=True)
class Reputation:
    """A reputation as it was when version ``height`` was made; absence counts from there."""

    value: float
    height: int


NEW = Reputation(0.0, 0)


def before(known: Reputation, height: int, absence: float) -> float:
    """The reputation with which a contributor enters the round that makes version ``height``.

    Args:
        known: As it was after the last round with an update of theirs.
        height: Of the version that is being made, above ``known.height``.
        absence: What every version that was made without them multiplies it by.
    """
    missed = max(0, height - known.height - 1)
    return round(known.value * absence**missed, DIGITS)


def after(value: float, outcome: Outcome, up: float, rejected: float, cheating: float) -> float:
    """The reputation with which they leave it: ``r + up (1 - r)`` for a positive round, a factor for the others."""
    moved = {
        Outcome.POSITIVE: value + up * (1.0 - value),
        Outcome.NOTHING: value,
        Outcome.REJECTED: value * rejected,
        Outcome.CHEATING: value * cheating,
    }[outcome]
    return round(moved, DIGITS)
