"""The rounds screens: a paged list, and one round with its verdicts, recipe and replay command."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from sqlalchemy import Connection, and_, func, or_, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.web.app import Looking
from gym_server.rounds.queue import SET_ASIDE
from gym_server.rounds.round_store import PAID_VERDICTS
from gym_server.rounds.versions import base_loss
from gym_server.store.tables import (
    accounts,
    contributions,
    credits,
    messages,
    nodes,
    rounds,
    updates,
    versions,
)
from gym_server.web.hub_view import MAX_ROWS, HubView

MAX_POINTS = 1000
"""Maximum number of points in the chart; beyond it, only every n-th version and the newest are drawn."""
_OPEN_VERDICTS = (*PAID_VERDICTS, "aborted")
"""Verdicts that the ledger of a private hub records in clear text."""
_LARGEST = 2**31 - 1


def routes(view: HubView) -> APIRouter:
    """Return the routes ``rounds``, ``rounds/losses`` and ``rounds/N``."""
    found = APIRouter()

    @found.get("/rounds")
    def page(
        visitor: Looking,
        before: Annotated[int | None, Query(ge=1, le=_LARGEST)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> dict[str, Any]:
        """Return rounds below ``before``, newest first."""
        query = select(rounds).order_by(rounds.c.server_round.desc()).limit(limit)
        if before is not None:
            query = query.where(rounds.c.server_round < before)
        with view.state.database.reading() as tx:
            total = tx.scalar(select(func.count()).select_from(rounds)) or 0
            rows = list(tx.execute(query))
            lines = _lines(tx, rows, view.is_sealed_from(visitor))
        for line in lines:
            line["opened_at"] = view.moment(visitor, line["opened_at"])
            line["closed_at"] = view.moment(visitor, line["closed_at"])
        last = rows[-1].server_round if rows else 1
        return {"total": total, "rounds": lines, "before": last if last > 1 else None}

    @found.get("/rounds/losses")
    def losses(visitor: Looking) -> dict[str, Any]:
        """Return held-out losses by version: ``[height, before, after]``; the base is ``[0, None, after]``."""
        with view.state.database.reading() as tx:
            points, step = losses_by_version(tx)
        return {"points": points, "step": step, "is_measured": view.is_measured}

    @found.get("/rounds/{server_round}")
    def one(
        visitor: Looking,
        server_round: Annotated[int, Path(ge=1, le=_LARGEST)],
        offset: Annotated[int, Query(ge=0, le=_LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 200,
    ) -> dict[str, Any]:
        """Return a round and a page of its updates, in order of arrival except that refused ones come last."""
        sealed = view.is_sealed_from(visitor)
        with view.state.database.reading() as tx:
            row = tx.execute(select(rounds).where(rounds.c.server_round == server_round)).first()
            if row is None:
                raise GymError(ErrorCode.NOT_FOUND, f"there is no round {server_round}", "see /rounds")
            line = _lines(tx, [row], sealed)[0]
            latest = int(tx.scalar(select(func.max(rounds.c.server_round))) or 0)
            total, sent = _updates(tx, server_round, offset, limit, sealed)
            aside = [] if sealed else _set_aside(tx, server_round)
        spec = json.loads(row.spec) if row.spec else {}
        line |= {
            "base_height": row.base_height,
            "deadline": row.deadline,
            "latest": latest,
            "recipe": _recipe(spec.get("recipe") or {}),
            "codec": (spec.get("codec") or {}).get("codec"),
            "opened_at": view.moment(visitor, row.opened_at),
            "closed_at": view.moment(visitor, row.closed_at),
            "is_sealed": sealed,
            "total": total,
            "updates": sent,
            "set_aside": aside,
            "replay": f"gym-server ledger replay {server_round} --dir HUB" if line["version"] else None,
        }
        return line

    return found


def losses_by_version(tx: Connection) -> tuple[list[list[Any]], int]:
    """Return held-out losses as ``[height, before, after]``, oldest first, and the interval between drawn versions."""
    columns = (versions.c.height, versions.c.heldout_before, versions.c.heldout_after)
    known = versions.c.heldout_after.is_not(None)
    newest = int(tx.scalar(select(func.max(versions.c.height))) or 0)
    step = newest // MAX_POINTS + 1
    chosen = or_(versions.c.height % step == 1 % step, versions.c.height == newest)
    rows = tx.execute(select(*columns).where(and_(known, chosen)).order_by(versions.c.height)).all()
    base = base_loss(tx)
    start = [] if base is None else [[0, None, base]]
    return [*start, *(list(row) for row in rows)], step


def _lines(tx: Connection, rows: list[Any], sealed: bool) -> list[dict[str, Any]]:
    """Return rounds with their versions and the counts of their verdicts."""
    numbers = [row.server_round for row in rows]
    by = (updates.c.server_round, updates.c.verdict)
    tally = select(*by, func.count()).where(updates.c.server_round.in_(numbers)).group_by(*by)
    if sealed:
        tally = tally.where(updates.c.verdict.in_(_OPEN_VERDICTS))
    made = {
        row.server_round: row
        for row in tx.execute(select(versions).where(versions.c.server_round.in_(numbers)))
    }
    counts: dict[int, dict[str, int]] = {}
    for number, verdict, count in tx.execute(tally):
        counts.setdefault(number, {})[verdict] = count
    return [_line(row, made.get(row.server_round), counts.get(row.server_round, {})) for row in rows]


def _line(row: Any, version: Any, counts: dict[str, int]) -> dict[str, Any]:
    line = {key: getattr(row, key) for key in ("server_round", "state", "reason", "opened_at", "closed_at")}
    line |= {"verdicts": counts, "version": None if version is None else version.height}
    made = ("digest", "soup_bytes", "heldout_before", "heldout_after", "num_updates")
    return line | {key: None if version is None else getattr(version, key) for key in made}


def _updates(
    tx: Connection, server_round: int, offset: int, limit: int, sealed: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of visible updates of a round, and a page of them."""
    where = updates.c.server_round == server_round
    if sealed:
        where = and_(where, updates.c.verdict.in_(_OPEN_VERDICTS))
    total = int(tx.scalar(select(func.count()).select_from(updates).where(where)) or 0)
    columns = (
        "update_id",
        "contributor",
        "verdict",
        "code",
        "reason",
        "delta_bytes",
        "norm",
        "heldout_change",
    )
    query = (
        select(
            *(updates.c[name] for name in columns),
            updates.c.manifest,
            accounts.c.name,
            contributions.c.score,
            contributions.c.error,
            contributions.c.reputation,
            credits.c.amount,
        )
        .outerjoin(accounts, accounts.c.contributor == updates.c.contributor)
        .outerjoin(contributions, contributions.c.update_id == updates.c.update_id)
        .outerjoin(
            credits,
            and_(
                credits.c.server_round == updates.c.server_round,
                credits.c.contributor == updates.c.contributor,
                updates.c.verdict.in_(PAID_VERDICTS),
            ),
        )
        .where(where)
        # In private rounds the order of arrival is hidden from viewers.
        .order_by(updates.c.verdict == "refused", updates.c.update_id if sealed else updates.c.received_at)
        .limit(limit)
        .offset(offset)
    )
    found = []
    for row in tx.execute(query).mappings():
        line = {"name": row["name"] or row["contributor"], "credit": row["amount"] or 0}
        line |= {"update": row["update_id"], "contributor": row["contributor"], "verdict": row["verdict"]}
        if not sealed:
            line |= {
                key: row[key]
                for key in ("code", "reason", "norm", "heldout_change", "score", "error", "reputation")
            }
            line["bytes"] = row["delta_bytes"]
            line["task_round"] = json.loads(row["manifest"]).get("server_round")
        found.append(line)
    return total, found


def _set_aside(tx: Connection, server_round: int) -> list[dict[str, Any]]:
    """Return the unreadable replies of a round, which are not updates in the ledger."""
    query = (
        select(messages.c.receipt, nodes.c.contributor, accounts.c.name)
        .join(nodes, nodes.c.node_id == messages.c.node_id)
        .outerjoin(accounts, accounts.c.contributor == nodes.c.contributor)
        .where(messages.c.group_id == str(server_round), messages.c.state == SET_ASIDE)
        .limit(MAX_ROWS)
    )
    return [
        {
            "contributor": row.contributor,
            "name": row.name or row.contributor,
            "verdict": SET_ASIDE,
            "reason": plain(json.loads(row.receipt)["reason"], 500),
        }
        for row in tx.execute(query)
    ]


def _recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that have a value."""
    return {key: value for key, value in recipe.items() if value not in (None, {}, [])}
