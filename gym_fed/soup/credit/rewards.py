"""A pool of whole credits, split by shares: nothing lost and nothing made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction


def whole(credits: float) -> int:
    """Whole credits, rounded down; a float that is a whole number but for its last bits is that number."""
    return math.floor(credits + 1e-6)


def split_pool(pool: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole credits for each name, proportional to its share (largest remainders; ties by name).

    Args:
        pool: What is paid out, whole.
        shares: At least 0 each; when none is above, nothing is paid out.
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
