"""The routes of the hub's health figures: process, disk, queue and refusals, as JSON and as Prometheus metrics.

Figures that could help an attacker (disk, queue, calls and connections) are only for the operator. In private rounds
this includes refusals, since their reasons depend on the content of updates.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection, func, select
from starlette.responses import Response

from gym_fed.core.metrics import CONTENT_TYPE
from gym_fed.version import __version__
from gym_fed.web.access import Role, Visitor
from gym_fed.web.app import Looking, Measuring
from gym_server.clock_watch import ContributorClocks
from gym_server.observe.metrics import RECENT_ROUNDS, Watched, exposed
from gym_server.rounds.steering import pause_of
from gym_server.store.tables import accounts, ledger, messages, nodes, objects, updates, uploads, versions
from gym_server.strategy.backoff import paused
from gym_server.traffic import HubTraffic
from gym_server.web.hub_view import HubView


def routes(view: HubView, traffic: HubTraffic) -> APIRouter:
    """Return the route ``health``."""
    found = APIRouter()

    @found.get("/health")
    def health(visitor: Looking) -> dict[str, Any]:
        """Return the figures of ``health_of``."""
        return health_of(view, traffic, visitor)

    return found


def beside(view: HubView, traffic: HubTraffic, clocks: ContributorClocks) -> APIRouter:
    """Return the route ``/metrics``, which is outside the API because Prometheus expects it there."""
    found = APIRouter()

    @found.get("/metrics")
    def metrics(visitor: Measuring) -> Response:
        """Return the figures in Prometheus' text format."""
        watched = None
        if visitor.role is Role.METRICS:
            visitor = replace(visitor, role=Role.OPERATOR)  # the role may read all of these figures
        if view.is_operator(visitor):
            watched = Watched(view.state, view.config, clocks, view.is_running)
        return Response(exposed(health_of(view, traffic, visitor), watched), media_type=CONTENT_TYPE)

    return found


def health_of(view: HubView, traffic: HubTraffic, visitor: Visitor) -> dict[str, Any]:
    """Return the health figures; those that the visitor may not see are None."""
    current, head = view.state.round_store.current(), view.state.round_store.head()
    is_operator = view.is_operator(visitor)
    with view.state.database.reading() as tx:
        by_status = select(accounts.c.status, func.count()).group_by(accounts.c.status)
        connected = select(func.count(nodes.c.contributor.distinct())).where(
            nodes.c.connected_until > view.state.clock.now()
        )
        shown = {
            "version": __version__,
            "is_running": view.is_running,
            "started_at": view.started_at,
            "server_round": current.server_round if current else 0,
            "round_state": current.state if current else "",
            "model_version": head.height,
            "accounts": dict(tx.execute(by_status).tuples().all()),
            "connected": int(tx.scalar(connected) or 0),
            "ledger_entries": int(tx.scalar(select(func.max(ledger.c.sequence))) or 0),
            "recent_rounds": RECENT_ROUNDS,
            "verdicts": None if view.is_sealed_from(visitor) else _verdicts(tx),
            "is_operator": is_operator,
            "pause": str(pause) if (pause := pause_of(tx)) else "",
        }
        stored = _stored(tx) if is_operator else None
        queue: dict[str, int] | None = dict(tx.execute(_BY_STATE).tuples().all()) if is_operator else None
    return {
        **shown,
        "paused": paused(view.state.database) if is_operator else None,
        "disk": _disk(view) if is_operator else None,
        "stored": stored,
        "queue": queue,
        "traffic": traffic.counts() if is_operator and view.is_running else None,
    }


_BY_STATE = select(messages.c.state, func.count()).group_by(messages.c.state)


def _verdicts(tx: Connection) -> list[dict[str, Any]]:
    """Return the counts of recent verdicts on updates, with the code of refusals at admission."""
    newest = int(tx.scalar(select(func.max(updates.c.server_round))) or 0)
    by = (updates.c.verdict, updates.c.code)
    recent = select(*by, func.count().label("number")).where(updates.c.server_round > newest - RECENT_ROUNDS)
    rows = tx.execute(recent.group_by(*by).order_by(*by))
    return [{"verdict": row.verdict, "code": row.code, "number": row.number} for row in rows]


def _stored(tx: Connection) -> dict[str, int]:
    """Return the number and bytes of all stored objects: uploads and soups."""
    soups = select(versions.c.soup_sha256, versions.c.soup_bytes)
    every = select(objects.c.sha256, objects.c.size_bytes).union(soups).subquery()
    number, size = tx.execute(select(func.count(), func.coalesce(func.sum(every.c.size_bytes), 0))).one()
    waiting = int(tx.scalar(select(func.count()).select_from(uploads)) or 0)
    return {"objects": number, "bytes": int(size), "uploads": waiting}


def _disk(view: HubView) -> dict[str, int | None]:
    usage = shutil.disk_usage(view.state.folder)
    path = view.state.database.sqlite_path
    beside_it = [] if path is None else [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    sizes = {file.name: file.stat().st_size for file in beside_it if file.exists()}
    return {
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "database_bytes": sum(sizes.values()) if path is not None else None,
        "wal_bytes": sizes.get(f"{path.name}-wal", 0) if path is not None else None,
    }
