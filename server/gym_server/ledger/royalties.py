"""Royalties: split credits for the use of versions among their contributors, and record each split once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.config.hub.credits import MAX_ROYALTIES
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.ledger.heads import HEADS_BEFORE
from gym_fed.trust.ledger.royalties import (
    Policy,
    RoundShare,
    attribute,
    find_version,
    paid_versions,
    split,
    totals,
)
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.tables import accounts, ledger, royalties


@dataclass(frozen=True)
class Owner:
    """The owner of a variant, and the owner's share of the amount."""

    contributor: str
    share: float


@dataclass(frozen=True)
class Attribution:
    """A split of an amount.

    Attributes:
        amount: The amount, in credits.
        policy: The weighting of rounds.
        used: Credits by digest of each used version.
        owner: The owner who was paid first, and the owner's credits.
        rounds: Credits by round, for every used version.
        shares: Total credits by contributor; they add up to ``amount``.
    """

    amount: int
    policy: Policy
    used: dict[str, int]
    owner: dict[str, Any] | None
    rounds: list[RoundShare]
    shares: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {**self.entry_fields(), "rounds": [share.to_dict() for share in self.rounds]}

    def entry_fields(self) -> dict[str, Any]:
        """Return the fields of the ledger entry."""
        return {
            "amount": self.amount,
            "policy": self.policy,
            "versions": self.used,
            "owner": self.owner,
            "shares": self.shares,
        }


def attribute_use(
    base: BaseSpec,
    database: Database,
    used: dict[str, int],
    amount: int,
    policy: Policy,
    owner: Owner | None = None,
) -> Attribution:
    """Split an amount among the contributors of the used versions.

    Args:
        base: The base model.
        database: The hub's database.
        used: Usage of each version, by height or digest; only proportions matter.
        amount: The amount, in whole credits.
        policy: The weighting of rounds.
        owner: The variant's owner, whose share is paid first.

    Raises:
        GymError: ``NOT_FOUND`` for an unknown version or owner, or if nobody was credited.
    """
    with database.reading() as tx:
        kinds = ledger.c.kind.in_(("version", "credit", "contribution"))
        rows = tx.execute(select(ledger.c.kind, ledger.c.body).where(kinds).order_by(ledger.c.sequence)).all()
        if owner is not None:
            _require_account(tx, owner.contributor)
    versions = paid_versions((row.kind, json.loads(row.body)) for row in rows)
    digests = {version.height: version.digest for version in versions}
    weights: dict[int, Fraction] = {}
    for name, weight in used.items():
        height = find_version(versions, name, base.digest)
        weights[height] = weights.get(height, Fraction(0)) + weight
    owned = int(amount * Fraction(str(owner.share))) if owner else 0
    by_height = split(amount - owned, dict(sorted(weights.items())))
    rounds = [
        share for height, part in by_height.items() for share in attribute(versions, height, part, policy)
    ]
    shares = totals(rounds)
    if owner and owned:
        shares[owner.contributor] = shares.get(owner.contributor, 0) + owned
    return Attribution(
        amount,
        policy,
        {digests[height]: part for height, part in by_height.items()},
        {"contributor": owner.contributor, "amount": owned} if owner else None,
        rounds,
        dict(sorted(shares.items())),
    )


def record(state: HubState, usage: str, found: Attribution) -> bool:
    """Record an attribution in the ledger and pay it, once per usage id.

    Returns:
        True if the attribution was recorded; False if it had been recorded before.

    Raises:
        GymError: ``REPLAYED`` if the id was recorded with other content; ``TOO_LARGE`` if the sum of all royalties
            would exceed the integer range.
    """
    body = {"usage": usage, **found.entry_fields()}
    with state.database.transaction() as tx:
        before = select(ledger.c.body).where(ledger.c.kind == "royalty").order_by(ledger.c.sequence)
        total = found.amount
        for text in tx.scalars(before):
            known = json.loads(text)
            total += known["amount"]
            if known["usage"] == usage:
                for added in ("at", HEADS_BEFORE):
                    known.pop(added, None)
                if known == body:
                    return False
                raise GymError(
                    ErrorCode.REPLAYED,
                    f"usage {usage!r} was recorded with {counted(known['amount'], 'credit')} for a different use",
                    "every usage report needs its own id: --usage-id",
                )
        if total > MAX_ROYALTIES:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"all royalties together would be {counted(total, 'credit')}; the maximum is {MAX_ROYALTIES}",
                "use a smaller --amount",
            )
        state.ledger.append(tx, "royalty", body)
        for contributor, amount in found.shares.items():
            row = {
                "usage": usage,
                "contributor": contributor,
                "amount": amount,
                "recorded_at": state.clock.now(),
            }
            tx.execute(royalties.insert().values(**row))
        state.ledger.sign_head(tx)
    return True


def read_usage(path: Path) -> tuple[dict[str, int], str]:
    """Read a usage report with a line per request or group of requests, ``{"version" or "model": ..., "tokens": n}``.

    Returns:
        Tokens by version (height or digest), and the file's sha256, which is its usage id.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no usage report at {path}: {error.strerror}") from error
    used: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, tokens = str(row["version"] if "version" in row else row["model"]), row["tokens"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise _bad_line(path, number) from error
        if type(tokens) is not int or tokens < 0:
            raise _bad_line(path, number)
        used[name] = used.get(name, 0) + tokens
    if not sum(used.values()):
        raise GymError(ErrorCode.DATA_INVALID, f"{path} counts no tokens", "there is nothing to attribute")
    return {name: tokens for name, tokens in used.items() if tokens}, hashlib.sha256(data).hexdigest()


def base_of_variant(path: Path) -> str:
    """Return the digest of the version that a ``.gymdelta`` is a variant of.

    Raises:
        GymError: See ``DeltaFile.open``.
    """
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(path, added_tokens=True) as delta:
        return delta.manifest.base_digest


def _require_account(tx: Connection, contributor: str) -> None:
    if tx.scalar(select(accounts.c.contributor).where(accounts.c.contributor == contributor)) is None:
        raise GymError(
            ErrorCode.NOT_FOUND, f"no contributor {contributor!r} on this hub", "gym-server status lists them"
        )


def _bad_line(path: Path, number: int) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{path}, line {number} is not a usage record",
        'a line reads {"version": HEIGHT or DIGEST, "tokens": N}; "model" may replace "version"',
    )
