"""The figures that the ledger has of the gate's newest evaluation."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import select

from gym_fed.core.text import counted
from gym_fed.trust.ledger.evaluations import EVALUATED
from gym_server.store.database import Database
from gym_server.store.tables import ledger


def last_evaluation(database: Database) -> dict[str, Any] | None:
    """What the gate's newest evaluation came to: round, outcome, and a figure for each task; None before the first."""
    newest = select(ledger.c.body).where(ledger.c.kind == EVALUATED).order_by(ledger.c.sequence.desc())
    with database.reading() as tx:
        text = tx.scalar(newest.limit(1))
    if text is None:
        return None
    body = json.loads(text)
    tasks = {
        name: {key: task[key] for key in ("metric", "num_samples", "before", "after", "after_stderr")}
        for suite in body["suites"]
        for name, task in suite["tasks"].items()
    }
    shown = {key: body.get(key) for key in ("server_round", "outcome", "height")}
    return {**shown, "tasks": tasks}


def last_evaluation_line(found: dict[str, Any]) -> str:
    """For the title of ``gym-server status``."""
    tasks = found["tasks"]
    before, after = (sum(task[side] for task in tasks.values()) / len(tasks) for side in ("before", "after"))
    return (
        f"evaluated in round {found['server_round']} ({found['outcome']}): mean of {counted(len(tasks), 'task')} "
        f"{before:.3f} -> {after:.3f}"
    )
