"""The home screen: the state of the round, contributors at work, the last verdicts, and facts about the hub."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection, func, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.text import whole_number
from gym_fed.web.app import Looking
from gym_server.rounds.merge_progress import merge_state
from gym_server.rounds.round_store import MERGING
from gym_server.rounds.steering import pause_of
from gym_server.rounds.versions import head_of
from gym_server.state import HubState
from gym_server.store.tables import accounts, ledger, messages, nodes, round_tasks, rounds, updates, versions
from gym_server.strategy.backoff import paused
from gym_server.strategy.lease_history import LeaseHistoryCache
from gym_server.web.entries import entry_events
from gym_server.web.hub_view import HubView

MAX_TASKS = 300
"""Maximum number of contributors at work that a snapshot lists; the others are counted."""
_MAX_VERDICTS = 20


def routes(view: HubView, lease_histories: LeaseHistoryCache, fingerprint: str) -> APIRouter:
    """Return the route ``overview``, with the initial data of the screen."""
    found = APIRouter()

    @found.get("/overview")
    def overview(visitor: Looking) -> dict[str, Any]:
        """Return the facts that do not change while rounds run, the last verdicts, and a snapshot."""
        recent = select(ledger).where(ledger.c.kind == "verdict").order_by(ledger.c.sequence.desc())
        with view.state.database.reading() as tx:
            verdicts = entry_events(tx, list(tx.execute(recent.limit(_MAX_VERDICTS))))
        return {
            "name": view.config.name,
            "server": view.state.server,
            "fingerprint": fingerprint,
            "base_model": view.config.public_base_name,
            "base_digest": view.state.base.digest,
            "listen": view.config.advertise or view.config.listen,
            "enrolment": view.config.enrolment.policy,
            "algorithm": view.config.recipe.algorithm,
            "aggregator": view.config.soup.aggregator,
            "num_rounds": view.config.rounds.num_rounds,
            "rounds": view.config.rounds.in_words(),
            "is_private": view.state.ledger.private,
            "is_measured": view.is_measured,
            "is_running": view.is_running,
            "verdicts": [event.data for event in verdicts],
            "now": view.state.clock.now(),
            "snapshot": snapshot(view.state, view.config, lease_histories),
        }

    return found


def snapshot(state: HubState, config: ServerConfig, lease_histories: LeaseHistoryCache) -> dict[str, Any]:
    """Return the state of the current round; the event ``snapshot`` has the same data.

    ``state`` is open, collecting, merging, committed or aborted, or empty before the first round. Times are Unix
    seconds. ``merge`` is ``{phase, done, total}`` in state merging. ``tasks`` has an item for each contributor at work,
    ``{name, outcome, phase, done, total}``, unfinished ones first. In private rounds, tasks are only counted, since
    every open page receives the snapshot.
    """
    with state.database.reading() as tx:
        current = tx.execute(select(rounds).order_by(rounds.c.server_round.desc()).limit(1)).first()
        number = current.server_round if current else 0
        by_outcome = _counts(tx, round_tasks.c.outcome, round_tasks.c.server_round == number)
        by_verdict = _counts(tx, updates.c.verdict, updates.c.server_round == number)
        head = head_of(tx, state.base.digest)
        losses = select(versions.c.heldout_after).where(versions.c.height == head.height)
        connected = select(func.count(func.distinct(nodes.c.contributor)))
        current_state = {
            "server_round": number,
            "state": current.state if current else "",
            "opened_at": current.opened_at if current else None,
            "deadline": current.deadline if current and config.rounds.mode == "synchronous" else None,
            "reason": current.reason if current else "",
            "merge": merge_state(tx) if current and current.state == MERGING else None,
            "quorum": config.rounds.quorum(lease_histories.num_counted(tx, number)),
            "connected": tx.scalar(connected.where(nodes.c.connected_until > state.clock.now())),
            "accounts": tx.scalar(select(func.count()).select_from(accounts)),
            "num_tasks": sum(by_outcome.values()),
            "num_awaited": by_outcome.get("", 0),
            "num_updates": by_outcome.get("replied", 0)
            if state.ledger.private
            else _num_counting(by_verdict),
            "verdicts": {} if state.ledger.private else by_verdict,
            "version": head.height,
            "version_digest": head.digest,
            "heldout": tx.scalar(losses),
            "tasks": [] if state.ledger.private else _tasks(tx, number),
            "pause": str(pause) if (pause := pause_of(tx)) else None,
        }
    return {**current_state, "paused": paused(state.database)}


def _num_counting(by_verdict: dict[str, int]) -> int:
    """Return the number of updates that count towards the quorum: all except those refused at admission."""
    return sum(count for verdict, count in by_verdict.items() if verdict != "refused")


def _counts(tx: Connection, column: Any, where: Any) -> dict[str, int]:
    return {
        value: count
        for value, count in tx.execute(select(column, func.count()).where(where).group_by(column))
    }


def _tasks(tx: Connection, server_round: int) -> list[dict[str, Any]]:
    query = (
        select(
            round_tasks.c.node_id,
            round_tasks.c.outcome,
            messages.c.progress,
            accounts.c.name,
            nodes.c.contributor,
        )
        .outerjoin(messages, messages.c.message_id == round_tasks.c.message_id)
        .outerjoin(nodes, nodes.c.node_id == round_tasks.c.node_id)
        .outerjoin(accounts, accounts.c.contributor == nodes.c.contributor)
        .where(round_tasks.c.server_round == server_round)
        .order_by(round_tasks.c.outcome, accounts.c.name, round_tasks.c.node_id)
        .limit(MAX_TASKS)
    )
    tasks = []
    for row in tx.execute(query):
        phase, _, counts = (row.progress or "").rpartition(" ")
        done, _, total = counts.partition("/")
        task = {
            "name": row.name or f"node {row.node_id}",
            "contributor": row.contributor,
            "outcome": row.outcome,
        }
        task |= {"phase": phase, "done": whole_number(done) or 0, "total": whole_number(total) or 0}
        tasks.append(task)
    return tasks
