"""The contributors screen: credits, reputation, recent verdicts, privacy spending, and revocation for the operator.

A viewer sees only what the ledger records in clear text. In private rounds this excludes verdicts at admission, the
reasons of rejections, and who is connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection, func, select

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.web.access import Visitor
from gym_fed.web.app import Changing, Looking
from gym_server.accounts.keys import Keys
from gym_server.privacy.budget import spent_on
from gym_server.rewards.payouts import Payouts
from gym_server.rewards.reputations import reputations_before
from gym_server.store.tables import accounts, contributions, credits, nodes, rounds, updates, versions
from gym_server.web.hub_view import HubView

STRIP_ROUNDS = 40
"""Number of rounds in the verdict strip of a list."""
LONG_STRIP_ROUNDS = 200
"""Number of rounds in the verdict strip of one contributor."""
MAX_POINTS = 2000
"""Maximum number of rounds in the charts of one contributor, the newest ones."""
_STRENGTH = ("refused", "admitted", "aborted", "rejected", "duplicate", "merged")
"""Verdicts in ascending order of precedence; for several updates in a round, the strip shows the highest."""
_AT_ADMISSION = ("refused", "admitted")

Sort = Literal["enrolled", "name", "credits", "reputation"]


class _Reason(StrictModel):
    reason: str = Field(min_length=1, max_length=500)


class _NewKey(StrictModel):
    public_key: str = Field(pattern=r"^[0-9a-fA-F]{64}$")


def routes(view: HubView, payouts: Payouts, keys: Keys) -> APIRouter:
    """Return the routes ``contributors`` and ``contributors/{id}``, with ``revoke`` and ``rebind`` below it."""
    found = APIRouter()

    @found.get("/contributors")
    def listed(
        visitor: Looking,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        find: Annotated[str, Query(max_length=80)] = "",
        sort: Sort = "enrolled",
    ) -> dict[str, Any]:
        """Return a page of accounts with balance, reputation, verdict strip and epsilon."""
        with view.state.database.reading() as tx:
            everybody = _everybody(view, payouts, tx, find, sort)
            shown = everybody[offset : offset + limit]
            ids = [one["contributor"] for one in shown]
            newest = _newest_round(tx)
            strips = _strips(view, tx, visitor, ids, newest - STRIP_ROUNDS)
            connected = None if view.is_sealed_from(visitor) else _connected(tx, ids, view.state.clock.now())
        spent = spent_on(view.config, view.state.database, ids)
        return {
            "total": len(everybody),
            "newest_round": newest,
            "strip_rounds": STRIP_ROUNDS,
            "has_privacy": view.config.privacy is not None,
            "contributors": [
                {
                    **one,
                    "connected": None if connected is None else one["contributor"] in connected,
                    "strip": strips[one["contributor"]],
                    "epsilon": spent[one["contributor"]]["epsilon"] if spent else None,
                }
                for one in shown
            ],
        }

    @found.get("/contributors/{contributor}")
    def one(visitor: Looking, contributor: str) -> dict[str, Any]:
        """Return one account over the rounds; for operators also its keys."""
        with view.state.database.reading() as tx:
            row = tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()
            if row is None:
                raise GymError(ErrorCode.NOT_FOUND, f"there is no contributor {plain(contributor, 80)!r}")
            newest = _newest_round(tx)
            is_sealed = view.is_sealed_from(visitor)
            found = {
                "contributor": contributor,
                "name": row.name,
                "status": row.status,
                "enrolled_at": row.enrolled_at,
                "connected": None
                if is_sealed
                else bool(_connected(tx, [contributor], view.state.clock.now())),
                **payouts.balance_of(tx, contributor),
                "reputation": _reputations(view, tx, [contributor])[contributor],
                "newest_round": newest,
                "strip_rounds": LONG_STRIP_ROUNDS,
                "strip": _strips(view, tx, visitor, [contributor], newest - LONG_STRIP_ROUNDS)[contributor],
                "over_rounds": (over_rounds := _over_rounds(tx, contributor)),
                "is_whole": len(over_rounds) < MAX_POINTS,
            }
        privacy = spent_on(view.config, view.state.database, [contributor]).get(contributor)
        return {
            **found,
            "privacy": privacy and {**privacy, "budget": view.config.privacy and view.config.privacy.epsilon},
            "may_change": view.may_change(visitor),
            "keys": keys.history_of(contributor) if view.is_operator(visitor) else None,
        }

    @found.post("/contributors/{contributor}/revoke")
    def revoke(visitor: Changing, contributor: str, given: _Reason) -> dict[str, Any]:
        """Revoke a key like `gym-server revoke`; return the revoked key and the number of cancelled transfers."""
        view.require_running()
        return keys.revoke_as_coordinator(contributor, plain(given.reason, 500))

    @found.post("/contributors/{contributor}/rebind")
    def rebind(visitor: Changing, contributor: str, given: _NewKey) -> dict[str, Any]:
        """Set a new key like `gym-server rebind`; return the account's new key."""
        view.require_running()
        return keys.rebind(contributor, bytes.fromhex(given.public_key))

    return found


def _everybody(
    view: HubView, payouts: Payouts, tx: Connection, find: str, sort: Sort
) -> list[dict[str, Any]]:
    """Return all matching accounts, sorted, without the fields that are expensive to compute."""
    columns = (accounts.c.contributor, accounts.c.name, accounts.c.status, accounts.c.enrolled_at)
    query = select(*columns).order_by(accounts.c.enrolled_at, accounts.c.contributor)
    if find:
        named = accounts.c.name.icontains(find, autoescape=True)
        query = query.where(named | accounts.c.contributor.startswith(find, autoescape=True))
    rows = tx.execute(query).all()
    balances = payouts.balances(tx)
    reputations = _reputations(view, tx, [row.contributor for row in rows])
    everybody = [
        {
            **row._asdict(),
            "balance": balances.get(row.contributor, 0),
            "reputation": reputations[row.contributor],
        }
        for row in rows
    ]
    if sort == "name":
        everybody.sort(key=lambda one: str(one["name"]).casefold())
    elif sort != "enrolled":
        field = {"credits": "balance", "reputation": "reputation"}[sort]
        everybody.sort(key=lambda one: float(one[field]), reverse=True)
    return everybody


def _reputations(view: HubView, tx: Connection, contributors: Iterable[str]) -> dict[str, float]:
    height = int(tx.scalar(select(func.max(versions.c.height))) or 0) + 1
    return reputations_before(tx, contributors, height, view.config.rewards.reputation)


def _newest_round(tx: Connection) -> int:
    return int(tx.scalar(select(func.max(rounds.c.server_round))) or 0)


def _connected(tx: Connection, contributors: Sequence[str], now: float) -> set[str]:
    of = nodes.c.contributor.in_(contributors) & (nodes.c.connected_until > now)
    return set(tx.scalars(select(nodes.c.contributor).where(of)))


def _strips(
    view: HubView, tx: Connection, visitor: Visitor, contributors: Sequence[str], after: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the verdicts of each contributor after a round, one per round, oldest first."""
    columns = (updates.c.contributor, updates.c.server_round, updates.c.verdict, updates.c.reason)
    query = select(*columns).where(updates.c.contributor.in_(contributors), updates.c.server_round > after)
    is_sealed = view.is_sealed_from(visitor)
    if is_sealed:
        query = query.where(updates.c.verdict.not_in(_AT_ADMISSION))
    found: dict[str, dict[int, dict[str, Any]]] = {who: {} for who in contributors}
    for row in tx.execute(query):
        reason = row.reason
        if is_sealed and row.verdict == "rejected":
            reason = ErrorCode.UPDATE_REFUSED.value  # the ledger also records only this code
        of_rounds = found[row.contributor]
        before = of_rounds.get(row.server_round)
        if before is None or _STRENGTH.index(row.verdict) > _STRENGTH.index(before["verdict"]):
            of_rounds[row.server_round] = {
                "server_round": row.server_round,
                "verdict": row.verdict,
                "reason": plain(reason, 300),
            }
    return {who: [line for _, line in sorted(by_round.items())] for who, by_round in found.items()}


def _over_rounds(tx: Connection, contributor: str) -> list[dict[str, Any]]:
    """Return a contributor's reputation, score with its error, and credits in each round, oldest first."""
    query = (
        select(
            contributions.c.server_round,
            contributions.c.reputation,
            contributions.c.score,
            contributions.c.error,
            func.coalesce(credits.c.amount, 0).label("credit"),
        )
        .outerjoin(
            credits,
            (credits.c.server_round == contributions.c.server_round)
            & (credits.c.contributor == contributions.c.contributor),
        )
        .where(contributions.c.contributor == contributor)
        .order_by(contributions.c.server_round.desc())
        .limit(MAX_POINTS)
    )
    return [dict(row) for row in tx.execute(query).mappings()][::-1]
