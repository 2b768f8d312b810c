"""Shamir's secret sharing: any ``threshold`` shares of a secret give it back, fewer say nothing.

The one place that takes a part of Flower's own secure aggregation (``crypto.shamir``, pycryptodome's sharing over
GF(2^128)). The rest of it is not used: its masks come from numpy's Mersenne Twister seeded with 32 bits, its keys are
not signed, and its state lives in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, islice

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from gym_fed.errors import ErrorCode, GymError

_MAX_TRIES = 5_000
"""Choices of shares that are tried before a secret is given up; only a liar's share makes more than one necessary."""


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """``count`` shares of a secret; share i names its own index."""
    return [bytes(share) for share in create_shares(secret, threshold, count)]


def join_secret(
    shares: Sequence[bytes], threshold: int, is_right: Callable[[bytes], bool], what: str
) -> bytes:
    """The secret that ``is_right``, from shares some of which may be forged.

    Args:
        shares: Each from another contributor.
        threshold: How many are needed.
        is_right: Checks a candidate against what its owner published.
        what: Names the secret in errors.

    Raises:
        GymError: ``ROUND_ABORTED`` when no ``threshold`` of the shares give it.
    """
    if len(shares) >= threshold:
        for chosen in islice(combinations(shares, threshold), _MAX_TRIES):
            try:
                secret = combine_shares(list(chosen))
            except (ValueError, IndexError):
                continue
            if is_right(secret):
                return secret
    raise GymError(
        ErrorCode.ROUND_ABORTED,
        f"{what}: {len(shares)} shares, of which no {threshold} give it back",
        "too few contributors stayed, or some sent false shares; the next round begins with fresh keys",
    )
