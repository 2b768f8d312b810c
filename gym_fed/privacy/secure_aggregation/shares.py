"""Shamir's secret sharing: any ``threshold`` shares restore a secret, while fewer shares reveal nothing.

This is the only module that uses a part of Flower's secure aggregation: ``crypto.shamir``, which is pycryptodome's
sharing over GF(2^128). Flower's other parts are not used, because their masks come from numpy's Mersenne Twister with a
32-bit seed, their keys are not signed, and their state is only in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from gym_fed.core.errors import ErrorCode, GymError


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into ``count`` shares. Each share contains its index."""
    return [bytes(share) for share in create_shares(secret, threshold, count)]


def join_secret(
    shares: Sequence[bytes], threshold: int, is_right: Callable[[bytes], bool], dealer: str, what: str
) -> bytes:
    """Restore the secret that ``is_right`` accepts, from shares that match their commitments.

    Only the first ``threshold`` shares are tried. Forged shares were already detected with the dealer's commitments, so
    if these shares do not restore the secret, the dealer did not split it correctly.

    Args:
        shares: Shares from different contributors, each checked against its ``share_commitment``.
        threshold: Number of shares that are needed.
        is_right: Returns True if the secret matches the value that the dealer published.
        dealer: Id of the contributor who owns the secret, for error messages.
        what: Name of the secret, for error messages.

    Raises:
        GymError: ``ROUND_ABORTED`` if there are too few shares, or if they do not restore the secret.
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
