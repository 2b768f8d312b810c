"""The first screen: the state of the round, who works on it, and how the hub does."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gym_fed.web.app import Looking
from gym_server.cli.live import look
from gym_server.federation import Federation
from gym_server.web.hub_view import HubView, router

MAX_TASKS = 500
"""Contributors at work that one snapshot lists; the others are counted."""


def routes(view: HubView) -> APIRouter:
    """``overview``: what the screen begins with."""
    found = router()

    @found.get("/overview")
    def overview(visitor: Looking) -> dict[str, Any]:
        fed = view.fed
        head = fed.round_store.head()
        return {
            "name": fed.config.name,
            "server": fed.server,
            "fingerprint": fed.fingerprint,
            "base_model": fed.public_base_name,
            "base_digest": fed.base.digest,
            "version": head.height,
            "version_digest": head.digest,
            "num_rounds": fed.config.rounds.num_rounds,
            "min_contributors": fed.config.rounds.min_contributors,
            "is_running": view.is_running,
            "snapshot": snapshot(fed),
        }

    return found


def snapshot(fed: Federation) -> dict[str, Any]:
    """The state of the round under way; an event of that name carries the same.

    ``state`` is open, collecting, merging, committed or aborted, or empty before the first round; ``deadline`` is in
    Unix seconds; ``tasks`` has a line for each contributor at work: ``{name, outcome, phase, done, total}``.
    """
    now = look(fed)
    tasks = sorted(now.tasks.values(), key=lambda task: (bool(task.outcome), task.name))
    return {
        "server_round": now.server_round,
        "state": now.state,
        "deadline": now.deadline,
        "connected": now.connected,
        "accounts": len(now.members),
        "tasks": [
            {"name": t.name, "outcome": t.outcome, "phase": t.phase, "done": t.done, "total": t.total}
            for t in tasks[:MAX_TASKS]
        ],
        "num_tasks": len(tasks),
        "num_awaited": sum(not task.outcome for task in tasks),
    }
