"""The model: its versions as a chain of digests, what each cost in bytes, and how well each did."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Connection, func, select

from gym_fed.config.hub.lineage import next_digest
from gym_fed.ledger.evaluations import EVALUATED
from gym_fed.web.app import Looking
from gym_server.store.tables import ledger, updates, versions
from gym_server.web.hub_view import HubView, router

MAX_POINTS = 2000
"""Versions in a chart, the newest ones."""
MAX_EVALUATIONS = 500
"""Evaluations in a chart, the newest ones."""
MAX_TASKS = 200
"""Curves of one answer."""


def routes(view: HubView) -> APIRouter:
    """``model``, a page of versions, and ``model/figures``, what its charts show."""
    found = router()
    fed = view.fed

    @found.get("/model")
    def listed(
        visitor: Looking,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 25,
    ) -> dict[str, Any]:
        newest = select(versions).order_by(versions.c.height.desc())
        with fed.database.reading() as tx:
            total, down = tx.execute(select(func.count(), func.sum(versions.c.soup_bytes))).one()
            rows = tx.execute(newest.offset(offset).limit(limit + 1)).all()
            of_rounds = [row.server_round for row in rows[:limit]]
            up = None if view.is_sealed_from(visitor) else _uploaded(tx, of_rounds)
        parents = [row.digest for row in rows[1:]]
        if len(rows) <= limit:
            parents.append(fed.base.digest)
        shown = list(zip(rows, parents, strict=False))
        head = rows[0] if rows and not offset else None
        return {
            "base_model": fed.public_base_name,
            "base_digest": fed.base.digest,
            "num_parameters": fed.base.num_parameters,
            "version": total if head is None else head.height,
            "total": total,
            "soups_bytes": int(down or 0),
            "chain_is_whole": all(
                next_digest(parent, row.soup_sha256, row.server_round) == row.digest for row, parent in shown
            ),
            "versions": [
                {
                    "height": row.height,
                    "digest": row.digest,
                    "parent": parent,
                    "soup": row.soup_sha256,
                    "server_round": row.server_round,
                    "soup_bytes": row.soup_bytes,
                    "uploaded_bytes": None if up is None else up.get(row.server_round, 0),
                    "num_updates": row.num_updates,
                    "heldout_before": row.heldout_before,
                    "heldout_after": row.heldout_after,
                    "committed_at": view.moment(visitor, row.committed_at),
                }
                for row, parent in shown
            ],
        }

    @found.get("/model/figures")
    def figures(visitor: Looking) -> dict[str, Any]:
        newest = select(versions.c.height, versions.c.heldout_before, versions.c.heldout_after)
        with fed.database.reading() as tx:
            rows = tx.execute(newest.order_by(versions.c.height.desc()).limit(MAX_POINTS)).all()[::-1]
            evaluations = _evaluations(tx)
        return {
            "heldout": [[row.height, row.heldout_after] for row in rows if row.heldout_after is not None],
            "evaluations": evaluations,
        }

    return found


def _uploaded(tx: Connection, of_rounds: list[int]) -> dict[int, int]:
    """Bytes of the merged updates, by round."""
    number = updates.c.server_round
    query = select(number, func.sum(updates.c.delta_bytes)).where(
        number.in_(of_rounds), updates.c.verdict == "merged"
    )
    return {server_round: int(total) for server_round, total in tx.execute(query.group_by(number))}


def _evaluations(tx: Connection) -> list[dict[str, Any]]:
    """What the gate measured of each version that was committed: a curve for each suite and task."""
    newest = select(ledger.c.body).where(ledger.c.kind == EVALUATED).order_by(ledger.c.sequence.desc())
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for text in reversed(tx.scalars(newest.limit(MAX_EVALUATIONS)).all()):
        body = json.loads(text)
        if body.get("height") is None:
            continue  # rolled back
        for suite in body["suites"]:
            for name, task in suite["tasks"].items():
                key = (suite["suite"], name)
                if key not in curves and len(curves) >= MAX_TASKS:
                    continue
                empty = {"suite": key[0], "task": name, "metric": task["metric"], "points": []}
                curve = curves.setdefault(key, empty)
                if not curve["points"]:
                    curve["points"].append([body["height"] - 1, task["before"], None])
                curve["points"].append([body["height"], task["after"], task.get("after_stderr")])
    return list(curves.values())
