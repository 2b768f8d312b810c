"""The hub's Prometheus metrics: a table of metric families, and the functions that collect their values.

Viewers get the figures of the health page. The others are only for the operator: in private rounds, exact times and
counts of verdicts would reveal what the ledger hides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from sqlalchemy import Connection, func, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.metrics import MetricRow, Value, exposition
from gym_fed.trust.identity.tls import validity
from gym_server.backup.backup import LAST_BACKUP
from gym_server.clock_watch import ContributorClocks
from gym_server.observe import instruments
from gym_server.privacy.budget import promise
from gym_server.rounds.versions import head_of
from gym_server.state import HubState
from gym_server.store.room import free_bytes
from gym_server.store.tables import (
    credits,
    ledger_heads,
    round_tasks,
    rounds,
    settings,
    versions,
)

RECENT_ROUNDS = 20
"""Number of rounds whose verdicts, tasks and outcomes are counted."""

_RECENT = f"of the last {RECENT_ROUNDS} rounds"
_HEALTH = (
    MetricRow("gym_hub_info", "Always 1; the label has the version", ("version",)),
    MetricRow("gym_hub_up", "1 while this process runs rounds"),
    MetricRow("gym_hub_start_time_seconds", "Start, Unix seconds"),
    MetricRow("gym_hub_round", "Number of the latest round"),
    MetricRow("gym_hub_model_version", "Height of the newest version"),
    MetricRow("gym_hub_connected", "Contributors that are connected"),
    MetricRow("gym_hub_ledger_entries", "Entries of the ledger"),
    MetricRow("gym_hub_paused", "1 while the hub is paused by the coordinator"),
    MetricRow("gym_hub_accounts", "Accounts by status", ("status",)),
    MetricRow(
        "gym_hub_recent_updates", f"Updates {_RECENT} by verdict and refusal code", ("verdict", "code")
    ),
    MetricRow("gym_hub_disk_total_bytes", "Size of the disk of the hub's folder"),
    MetricRow("gym_hub_disk_free_bytes", "Free space of the fullest disk that the hub writes to"),
    MetricRow("gym_hub_database_bytes", "Bytes of the SQLite database with its WAL"),
    MetricRow("gym_hub_database_wal_bytes", "Bytes of the SQLite database's write-ahead log"),
    MetricRow("gym_hub_objects", "Objects in the store"),
    MetricRow("gym_hub_objects_bytes", "Bytes of the objects in the store"),
    MetricRow("gym_hub_uploads", "Uploads that no update uses yet"),
    MetricRow(
        "gym_hub_messages", "Messages of the queue by state; leased ones are tasks in work", ("state",)
    ),
    MetricRow("gym_hub_calls", "Calls since the start", ("method",), "counter"),
    MetricRow("gym_hub_refusals", "Refused calls since the start by error code", ("code",), "counter"),
    MetricRow(
        "gym_hub_download_bytes", "Bytes of objects sent to contributors since the start", (), "counter"
    ),
    MetricRow("gym_hub_seeders", "Contributors who serve objects"),
    MetricRow("gym_hub_seeding_tickets", "Downloads that contributors were asked to serve", (), "counter"),
    MetricRow(
        "gym_hub_seeding_failures", "Downloads from contributors that failed, as reported", (), "counter"
    ),
    MetricRow("gym_hub_connections", "Open connections"),
)
_OPERATOR = (
    MetricRow("gym_hub_rounds", "Rounds by state", ("state",)),
    MetricRow("gym_hub_recent_rounds", f"Rounds by state {_RECENT}", ("state",)),
    MetricRow("gym_hub_rounds_remaining", "Rounds that are still to be committed"),
    MetricRow("gym_hub_recent_tasks", f"Tasks {_RECENT} by outcome", ("outcome",)),
    MetricRow("gym_hub_round_opened_timestamp_seconds", "When the latest round opened, Unix seconds"),
    MetricRow(
        "gym_hub_last_commit_timestamp_seconds",
        "When the newest version was committed, Unix seconds; 0: never",
    ),
    MetricRow("gym_hub_last_round_seconds", "Duration of the last ended round"),
    MetricRow("gym_hub_round_deadline_seconds", "The config's rounds.deadline_seconds"),
    MetricRow("gym_hub_failed_rounds_in_a_row", "Rounds without a version since the last committed round"),
    MetricRow("gym_hub_heldout_loss", "Held-out loss of the newest version, nats"),
    MetricRow("gym_hub_heldout_loss_before", "Held-out loss of the version before it, nats"),
    MetricRow("gym_hub_reward_pool_credits", "Maximum credits that a round may pay"),
    MetricRow("gym_hub_last_round_credits", "Credits that the newest version paid"),
    MetricRow("gym_hub_disk_reserve_bytes", "The config's storage.reserve_bytes"),
    MetricRow("gym_hub_ledger_signed_entries", "Entries that the newest signed head covers"),
    MetricRow("gym_hub_certificate_expiry_timestamp_seconds", "End of the TLS certificate, Unix seconds"),
    MetricRow(
        "gym_hub_clock_skew_seconds", "Seconds by which this machine is ahead of the contributors' median"
    ),
    MetricRow("gym_hub_clocks", "Contributors whose clocks are in that median"),
    MetricRow("gym_hub_backup_timestamp_seconds", "When the last backup finished, Unix seconds; 0: never"),
    MetricRow("gym_hub_epsilon_spent", "Privacy budget spent so far; private rounds only"),
    MetricRow("gym_hub_epsilon_budget", "Privacy budget of the run; private rounds only"),
)
ROWS = (*_HEALTH, *_OPERATOR)
"""All metric families of a hub except those of ``instruments.ROWS``."""


class Watched(NamedTuple):
    """The parts of a hub whose figures are only for the operator."""

    state: HubState
    config: ServerConfig
    clocks: ContributorClocks
    is_running: bool


def exposed(health: dict[str, Any], watched: Watched | None) -> bytes:
    """Return the metrics in Prometheus' text format.

    Args:
        health: The figures of ``gym_server.web.health.health_of``; None values are left out.
        watched: Operator-only parts of the hub; None if the caller is not the operator.
    """
    values = {**_health_values(health), **(_operator_values(watched) if watched is not None else {})}
    text = exposition(ROWS, values)
    return (
        text + generate_latest(instruments.REGISTRY) if watched is not None and watched.is_running else text
    )


def _health_values(health: dict[str, Any]) -> dict[str, Value | None]:
    disk, stored, traffic = health["disk"] or {}, health["stored"] or {}, health["traffic"] or {}
    seeding, verdicts = traffic.get("seeding", {}), health["verdicts"]
    return {
        "gym_hub_info": {health["version"]: 1},
        "gym_hub_up": int(health["is_running"]),
        "gym_hub_start_time_seconds": health["started_at"],
        "gym_hub_round": health["server_round"],
        "gym_hub_model_version": health["model_version"],
        "gym_hub_connected": health["connected"],
        "gym_hub_ledger_entries": health["ledger_entries"],
        "gym_hub_paused": int(bool(health["pause"])),
        "gym_hub_accounts": health["accounts"],
        "gym_hub_recent_updates": None
        if verdicts is None
        else {(line["verdict"], line["code"]): line["number"] for line in verdicts},
        "gym_hub_disk_total_bytes": disk.get("total_bytes"),
        "gym_hub_disk_free_bytes": disk.get("free_bytes"),
        "gym_hub_database_bytes": disk.get("database_bytes"),
        "gym_hub_database_wal_bytes": disk.get("wal_bytes"),
        "gym_hub_objects": stored.get("objects"),
        "gym_hub_objects_bytes": stored.get("bytes"),
        "gym_hub_uploads": stored.get("uploads"),
        "gym_hub_messages": health["queue"],
        "gym_hub_calls": traffic.get("calls"),
        "gym_hub_refusals": traffic.get("refusals"),
        "gym_hub_download_bytes": traffic.get("download_bytes"),
        "gym_hub_seeders": seeding.get("seeders"),
        "gym_hub_seeding_tickets": seeding.get("tickets"),
        "gym_hub_seeding_failures": seeding.get("failures"),
        "gym_hub_connections": traffic.get("connections"),
    }


def _operator_values(watched: Watched) -> dict[str, Value | None]:
    state, config = watched.state, watched.config
    ahead, num_clocks = watched.clocks.median()
    wall, now = state.clock.wall(), state.clock.now()
    with state.database.reading() as tx:
        values = _database_values(tx, state, config, wall - now)
    central = promise(config, state.database)
    return {
        **values,
        "gym_hub_round_deadline_seconds": config.rounds.deadline_seconds,
        "gym_hub_reward_pool_credits": config.rewards.pool,
        "gym_hub_disk_free_bytes": min(free_bytes(state, config).values()),
        "gym_hub_disk_reserve_bytes": config.storage.reserve_bytes,
        "gym_hub_certificate_expiry_timestamp_seconds": _certificate_end(state.folder),
        "gym_hub_clock_skew_seconds": wall - now - ahead if num_clocks else 0.0,
        "gym_hub_clocks": num_clocks,
        "gym_hub_epsilon_spent": central.get("epsilon_spent"),
        "gym_hub_epsilon_budget": central.get("epsilon"),
    }


def _database_values(
    tx: Connection, state: HubState, config: ServerConfig, to_wall: float
) -> dict[str, Value | None]:
    """Return the metrics that are computed from the database.

    Args:
        tx: A transaction.
        state: The hub's state.
        config: The current config.
        to_wall: Offset from the hub's clock to the machine's clock, which Prometheus uses, in seconds.
    """
    latest = tx.execute(select(rounds).order_by(rounds.c.server_round.desc()).limit(1)).first()
    ended = select(rounds).where(rounds.c.closed_at.is_not(None)).order_by(rounds.c.server_round.desc())
    last = tx.execute(ended.limit(1)).first()
    version = tx.execute(select(versions).order_by(versions.c.height.desc()).limit(1)).first()
    recent = (latest.server_round if latest else 0) - RECENT_ROUNDS
    paid = select(func.coalesce(func.sum(credits.c.amount), 0))
    committed = state.round_store.depths.of(tx, head_of(tx, state.base.digest).height)
    backup = tx.scalar(select(settings.c.value).where(settings.c.key == LAST_BACKUP))
    return {
        "gym_hub_rounds": _counts(tx, select(rounds.c.state, func.count()).group_by(rounds.c.state)),
        "gym_hub_recent_rounds": _counts(
            tx,
            select(rounds.c.state, func.count())
            .where(rounds.c.server_round > recent)
            .group_by(rounds.c.state),
        ),
        "gym_hub_recent_tasks": {
            outcome or "open": number
            for outcome, number in _counts(
                tx,
                select(round_tasks.c.outcome, func.count())
                .where(round_tasks.c.server_round > recent)
                .group_by(round_tasks.c.outcome),
            ).items()
        },
        "gym_hub_rounds_remaining": max(0, config.rounds.num_rounds - committed),
        "gym_hub_round_opened_timestamp_seconds": latest.opened_at + to_wall if latest else None,
        "gym_hub_last_commit_timestamp_seconds": version.committed_at + to_wall if version else 0,
        "gym_hub_last_round_seconds": last.closed_at - last.opened_at if last else None,
        "gym_hub_failed_rounds_in_a_row": _failed_in_a_row(tx),
        "gym_hub_heldout_loss": version.heldout_after if version else None,
        "gym_hub_heldout_loss_before": version.heldout_before if version else None,
        "gym_hub_last_round_credits": tx.scalar(paid.where(credits.c.server_round == version.server_round))
        if version
        else None,
        "gym_hub_ledger_signed_entries": tx.scalar(select(func.coalesce(func.max(ledger_heads.c.size), 0))),
        "gym_hub_backup_timestamp_seconds": float(backup or 0),
    }


def _counts(tx: Connection, query: Any) -> dict[str, float]:
    return {str(name): float(number) for name, number in tx.execute(query)}


def _failed_in_a_row(tx: Connection) -> int:
    """Return the number of aborted rounds since the last committed one."""
    committed = select(func.coalesce(func.max(rounds.c.server_round), 0)).where(rounds.c.state == "committed")
    aborted = select(func.count()).where(
        rounds.c.state == "aborted", rounds.c.server_round > committed.scalar_subquery()
    )
    return int(tx.scalar(aborted) or 0)


def _certificate_end(folder: Path) -> float:
    return validity((folder / "keys" / "tls.crt").read_bytes())[1].timestamp()
