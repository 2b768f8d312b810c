"""Which updates are suspiciously large, judged against the round's median norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NormVerdict:
    """One update's norm, as a multiple of the round's median, and what follows.

    Attributes:
        norm: L2 norm of the update.
        ratio: Norm over median; infinite for a norm above a median of zero.
        accepted: Whether it stays in.
        reason: Why not, in words for the contributor; empty when accepted.
    """

    norm: float
    ratio: float
    accepted: bool
    reason: str


def screen_norms(norms: Sequence[float], ratio: float) -> list[NormVerdict]:
    """A verdict for each norm, in order: refused are those above ``ratio`` times the median.

    While fewer than half of a round's updates are malicious, the median lies between honest norms.

    Args:
        norms: L2 norm of each update, finite and not negative.
        ratio: At least 1.

    Raises:
        ValueError: For a ratio below 1 or a norm that is not finite.
    """
    if not ratio >= 1.0:
        raise ValueError(f"ratio {ratio} is below 1: half of all honest updates would be refused")
    if not all(math.isfinite(norm) and norm >= 0.0 for norm in norms):
        raise ValueError(f"norms {list(norms)} are not all finite and at least 0")
    if not norms:
        return []
    median = statistics.median(norms)
    return [_verdict(norm, median, ratio) for norm in norms]


def _verdict(norm: float, median: float, ratio: float) -> NormVerdict:
    multiple = norm / median if median > 0.0 else (math.inf if norm > 0.0 else 1.0)
    if multiple <= ratio:
        return NormVerdict(norm, multiple, True, "")
    reason = f"its norm {norm:.4g} is {multiple:.3g} times the median {median:.4g}, over {ratio:g} times"
    return NormVerdict(norm, multiple, False, reason)
