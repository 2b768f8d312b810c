"""Shamir's secret sharing: any ``threshold`` shares restore a secret, fewer reveal nothing.

This is the only module that uses a part of Flower's own secure aggregation (``crypto.shamir``, pycryptodome's sharing
over GF(2^128)). The rest of it is not used: its masks come from numpy's Mersenne Twister seeded with 32 bits, its keys
are not signed, and its state lives in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from gym_fed.core.errors import ErrorCode, GymError


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into ``count`` shares; each contains its index."""
    return [bytes(share) for share in create_shares(secret, threshold, count)]


def join_secret(
    shares: Sequence[bytes], threshold: int, is_right: Callable[[bytes], bool], dealer: str, what: str
) -> bytes:
    """Restore the secret that ``is_right`` accepts, from shares that match their commitments.

    Only the first ``threshold`` shares are tried: forged shares were already detected by the dealer's commitments, so
    if these shares do not restore the secret, the dealer did not split it correctly.

    Args:
        shares: Shares from different contributors, each checked against its ``share_commitment``.
        threshold: Number of shares needed.
        is_right: Returns True if the secret matches the dealer's published value.
        dealer: Id of the secret's owner, for error messages.
        what: Name of the secret, for error messages.

    Raises:
        GymError: ``ROUND_ABORTED`` if the shares are too few, or do not restore the secret.
    """
    if len(shares) < threshold:
        raise GymError(
            ErrorCode.ROUND_ABORTED,
            f"{what} of {dealer}: {len(shares)} shares, but {threshold} are needed",
            "too few contributors stayed; the next round begins with fresh keys",
        )
    try:
        secret = combine_shares(list(shares[:threshold]))
    except (ValueError, IndexError):
        secret = b""
    if not is_right(secret):
        raise GymError(
            ErrorCode.ROUND_ABORTED,
            f"{what} of {dealer}: the shares that {dealer} dealt do not restore it",
            "its machine is broken or its client malicious: revoke it if this happens again",
        )
    return secret
