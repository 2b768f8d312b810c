"""A summary of every round, for tables and pages."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select

from gym_server.store.tables import round_tasks, rounds, updates, versions


def history_of(tx: Connection) -> list[dict[str, Any]]:
    """Return every round with its version, its tasks and the counts of its verdicts, oldest first.

    ``working`` is the number of contributors at work when the round ended, or now if it is running.
    """
    by = (updates.c.server_round, updates.c.verdict)
    made = {version.server_round: version for version in tx.execute(select(versions))}
    verdicts: dict[int, dict[str, int]] = {}
    for server_round, verdict, count in tx.execute(select(*by, func.count()).group_by(*by)):
        verdicts.setdefault(server_round, {})[verdict] = count
    tasks: dict[int, dict[str, int]] = {}
    by_outcome = (round_tasks.c.server_round, round_tasks.c.outcome)
    for server_round, outcome, count in tx.execute(select(*by_outcome, func.count()).group_by(*by_outcome)):
        tasks.setdefault(server_round, {})[outcome] = count
    rows = tx.execute(select(rounds).order_by(rounds.c.server_round))
    return [
        {
            **_line(row, made.get(row.server_round), verdicts.get(row.server_round, {})),
            "tasks": sum(tasks.get(row.server_round, {}).values()),
            "working": tasks.get(row.server_round, {}).get("", 0),
        }
        for row in rows
    ]


def _line(row: Any, version: Any, verdicts: dict[str, int]) -> dict[str, Any]:
    columns = ("server_round", "state", "reason", "opened_at", "closed_at")
    line = {column: getattr(row, column) for column in columns}
    line |= {"verdicts": verdicts, "version": None if version is None else version.height}
    figures = ("digest", "soup_bytes", "heldout_before", "heldout_after")
    return line | {column: None if version is None else getattr(version, column) for column in figures}
