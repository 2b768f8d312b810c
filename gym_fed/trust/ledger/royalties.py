"""Royalties: split credits for the use of a version among the rounds that led to it and their contributors.

A version is the result of all rounds up to it, so only those are paid. The weight of a round is its reduction of the
held-out loss (``improvement``) or one (``equal``). Within a round, shares are proportional to the earned credits; an
update that was measured and did not lower the loss gets nothing. Both splits use the largest remainder method, so the
shares are whole credits that add up to the amount.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, TypeVar

from gym_fed.core.errors import ErrorCode, GymError

Policy = Literal["improvement", "equal"]
K = TypeVar("K", bound=Hashable)


@dataclass
class PaidVersion:
    """A version and the credits that were earned in its round.

    Attributes:
        height: Number of the version, from 1.
        digest: Digest of the version.
        server_round: Round that created the version.
        improvement: Reduction of the held-out loss; None if it was not measured.
        credits: Credits by contributor, without those for updates that were measured and gained nothing.
    """

    height: int
    digest: str
    server_round: int
    improvement: float | None
    credits: dict[str, int] = field(default_factory=dict)
    parent: str | None = None


@dataclass(frozen=True)
class RoundShare:
    """The share of one round in an amount, and its recipients."""

    height: int
    server_round: int
    amount: int
    shares: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.height,
            "server_round": self.server_round,
            "amount": self.amount,
            "shares": self.shares,
        }


def paid_versions(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> list[PaidVersion]:
    """Return the versions in a ledger, oldest first, given the kinds and bodies of the entries."""
    versions: list[PaidVersion] = []
    paid: dict[int, dict[str, int]] = {}
    without: dict[int, set[str]] = {}
    for kind, body in entries:
        if kind == "version":
            before, after = body.get("heldout_before"), body.get("heldout_after")
            improvement = None if before is None or after is None else float(before) - float(after)
            made = PaidVersion(body["height"], body["digest"], body["server_round"], improvement)
            made.parent = body.get("parent")
            versions.append(made)
        elif kind == "credit":
            paid.setdefault(body["server_round"], {})[body["contributor"]] = body["amount"]
        elif kind == "contribution":
            without[body["server_round"]] = set(body.get("without_gain", ()))
    for version in versions:
        helpful = paid.get(version.server_round, {}).keys() - without.get(version.server_round, set())
        credits = paid.get(version.server_round, {})
        version.credits = {who: credits[who] for who in credits if who in helpful and credits[who] > 0}
    return sorted(versions, key=lambda version: version.height)


def find_version(versions: Sequence[PaidVersion], name: str, base_digest: str = "") -> int:
    """Return the height of a version, given its height or digest as text.

    Raises:
        GymError: ``NOT_FOUND`` for an unknown version, or for the base, which has no contributors.
    """
    for version in versions:
        if name in (version.digest, str(version.height)):
            return version.height
    if name in ("0", base_digest):
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"version {name[:19]} is the base itself, which was not made by contributors of this hub",
            "there is nobody to credit for it",
        )
    raise GymError(
        ErrorCode.NOT_FOUND,
        f"no version {name!r} in the ledger",
        "gym-server rounds --json lists heights and digests",
    )


def attribute(
    versions: Sequence[PaidVersion], height: int, amount: int, policy: Policy = "improvement"
) -> list[RoundShare]:
    """Split an amount among the rounds of a version and their contributors.

    With ``improvement``, a round without a measured loss gets the mean weight of the measured rounds. If no measured
    round lowered the loss, all rounds have equal weight. Rounds without credited contributors are skipped.

    Args:
        versions: Versions from ``paid_versions``.
        height: Height of the version that was used.
        amount: Number of credits.
        policy: ``improvement`` or ``equal``.

    Raises:
        GymError: ``NOT_FOUND`` if no round up to the version has credited anyone.
    """
    chain = [version for version in _leading_to(versions, height) if version.credits]
    if not chain:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"no round up to version {height} credited anybody",
            "royalties follow the credits of the rounds; see `gym-server ledger show --kind credit`",
        )
    by_height = split(amount, dict(zip((v.height for v in chain), _weights(chain, policy), strict=True)))
    round_shares = []
    for version in chain:
        shares = split(by_height[version.height], {who: Fraction(n) for who, n in version.credits.items()})
        paid = {who: shares[who] for who in sorted(shares) if shares[who]}
        round_shares.append(RoundShare(version.height, version.server_round, by_height[version.height], paid))
    return round_shares


def _leading_to(versions: Sequence[PaidVersion], height: int) -> list[PaidVersion]:
    """Return the versions from the base to the one with this height, oldest first, without abandoned ones."""
    by_digest = {version.digest: version for version in versions}
    by_height = {version.height: version for version in versions}
    path, at = list[PaidVersion](), by_height.get(height)
    while at is not None:
        path.append(at)
        at = by_height.get(at.height - 1) if at.parent is None else by_digest.get(at.parent)
    return path[::-1]


def totals(rounds: Iterable[RoundShare]) -> dict[str, int]:
    """Return the total credits of each contributor."""
    amounts: dict[str, int] = {}
    for share in rounds:
        for who, amount in share.shares.items():
            amounts[who] = amounts.get(who, 0) + amount
    return dict(sorted(amounts.items()))


def split(amount: int, weights: Mapping[K, Fraction]) -> dict[K, int]:
    """Split an amount into integers by weights, at least one of which is positive (largest remainder method)."""
    total = sum(weights.values())
    exact = {key: amount * weight / total for key, weight in weights.items()}
    parts = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: parts[key] - exact[key])
    for key in by_remainder[: amount - sum(parts.values())]:
        parts[key] += 1
    return parts


def _weights(chain: Sequence[PaidVersion], policy: Policy) -> list[Fraction]:
    equal = [Fraction(1)] * len(chain)
    if policy == "equal":
        return equal
    measured = [Fraction(max(0.0, v.improvement)) for v in chain if v.improvement is not None]
    if not sum(measured):
        return equal
    mean = sum(measured, Fraction(0)) / len(measured)
    return [mean if v.improvement is None else Fraction(max(0.0, v.improvement)) for v in chain]
