"""A snapshot of a hub's state, read from its database: the round, active contributors, verdicts and losses."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.text import readable_bytes, whole_number
from gym_server.rounds.merge_progress import merge_state, merge_text
from gym_server.rounds.round_store import MERGING, PAID_VERDICTS
from gym_server.rounds.steering import pause_of
from gym_server.rounds.versions import base_loss, head_of, newest_to
from gym_server.state import HubState
from gym_server.store.tables import accounts, messages, nodes, round_tasks, rounds, updates, versions
from gym_server.strategy.lease_history import LeaseHistoryCache

_COUNTED_IN_BYTES = ("fetch", "upload")
_VERSIONS = 6
"""Number of newest versions whose loss is read."""


@dataclass(frozen=True)
class TaskProgress:
    """The progress of one contributor in the current round."""

    name: str
    outcome: str
    """Empty while the task is open, else ``replied``, ``failed`` or ``lost``."""
    phase: str = ""
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        if self.outcome:
            return self.outcome
        if not self.phase:
            return "not started"
        if not self.total:
            return self.phase
        if self.phase in _COUNTED_IN_BYTES:
            return f"{self.phase} {readable_bytes(self.done)} of {readable_bytes(self.total)}"
        return f"{self.phase} {self.done}/{self.total}"


class VersionLoss(NamedTuple):
    """The loss of one version.

    Attributes:
        server_round: Round that created the version; 0 for version 0.
        loss: The loss, in nats per token.
        source: Data that the loss was measured on.
        before: Loss of the parent version on the same held-out rows; None if there are no held-out rows.
    """

    server_round: int
    loss: float
    source: str
    before: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of a hub at one moment. Names are unescaped, as their owners wrote them."""

    server_round: int = 0
    state: str = ""
    deadline: float | None = None
    """Deadline of the round (Unix seconds); None in continuous rounds."""
    tasks: dict[int, TaskProgress] = field(default_factory=dict)
    """Tasks by node id."""
    members: dict[str, str] = field(default_factory=dict)
    """Names of accounts, by id."""
    connected: int = 0
    verdicts: dict[str, tuple[int, str, str, str]] = field(default_factory=dict)
    """Round, contributor, verdict and reason of each update of the current and the previous round, by update."""
    losses: dict[int, VersionLoss] = field(default_factory=dict)
    """Losses of the newest ancestors of the current version, by height, and of version 0 if its held-out loss is known.
    """
    version: int = 0
    """Height of the current version; it decreases after `gym-server rollback`."""
    committed: int = 0
    """Number of committed rounds, out of ``num_rounds``, in the current version."""
    num_rounds: int = 0
    quorum: int = 0
    merge: str = ""
    """Phase and steps of the merge, as text; empty unless the state is merging."""
    reason: str = ""
    """Reason why the last round was aborted."""
    pause: str = ""
    """Description of the coordinator's pause; empty if there is none."""
    seen_at: float = field(default_factory=time.time)
    """Time of the snapshot by the hub's clock, Unix seconds."""

    @property
    def admitted(self) -> int:
        """Number of the round's updates that count towards the quorum."""
        return sum(
            number == self.server_round and verdict in ("admitted", *PAID_VERDICTS)
            for number, _, verdict, _ in self.verdicts.values()
        )

    @property
    def awaited(self) -> int:
        """Number of contributors with an open task; 0 once the round is over."""
        if self.state not in ("open", "collecting"):
            return 0
        return sum(not task.outcome for task in self.tasks.values())


def read_snapshot(
    state: HubState, config: ServerConfig, lease_histories: LeaseHistoryCache, before: Snapshot | None = None
) -> Snapshot:
    """Read the hub's state without writing and without waiting for a writer.

    Args:
        lease_histories: The earlier tasks of contributors.
        before: Earlier snapshot, whose losses are reused.
    """
    now = state.clock.now()
    known = {} if before is None else {(h, loss.server_round): loss for h, loss in before.losses.items()}
    with state.database.reading() as tx:
        current = tx.execute(select(rounds).order_by(rounds.c.server_round.desc()).limit(1)).first()
        members = {
            row.contributor: row.name for row in tx.execute(select(accounts.c.contributor, accounts.c.name))
        }
        owners = {row.node_id: row for row in tx.execute(select(nodes))}
        number = current.server_round if current else 0
        work = (
            select(round_tasks.c.node_id, round_tasks.c.outcome, messages.c.progress)
            .outerjoin(messages, messages.c.message_id == round_tasks.c.message_id)
            .where(round_tasks.c.server_round == number)
        )
        tasks = {}
        for row in tx.execute(work):
            owner = owners.get(row.node_id)
            name = members.get(owner.contributor, owner.contributor) if owner else str(row.node_id)
            tasks[row.node_id] = TaskProgress(name, row.outcome, *_progress(row.progress or ""))
        sent = tx.execute(select(updates).where(updates.c.server_round >= number - 1)).all()
        num_counted = lease_histories.num_counted(tx, number)
        pause = pause_of(tx)
        merge = merge_state(tx) if current and current.state == MERGING else None
        version = head_of(tx, state.base.digest).height
        newest = versions.c.height.in_(newest_to(tx, version, _VERSIONS))
        committed = state.round_store.depths.of(tx, version)
        version_rows = tx.execute(select(versions).where(newest).order_by(versions.c.height.desc())).all()
        losses = {
            row.height: loss
            for row in version_rows
            if (loss := known.get((row.height, row.server_round)) or _loss(tx, row)) is not None
        }
        if losses and (base := base_loss(tx)) is not None:
            losses = {**losses, 0: VersionLoss(0, base, "held-out")}
    return Snapshot(
        server_round=number,
        state=current.state if current else "",
        deadline=current.deadline if current and config.rounds.mode == "synchronous" else None,
        seen_at=now,
        tasks=tasks,
        members=members,
        connected=len({row.contributor for row in owners.values() if row.connected_until > now}),
        verdicts={
            row.update_id: (row.server_round, row.contributor, row.verdict, row.reason) for row in sent
        },
        losses=losses,
        version=version,
        committed=committed,
        num_rounds=config.rounds.num_rounds,
        quorum=config.rounds.quorum(num_counted),
        merge=merge_text(merge) if merge else "",
        reason=current.reason if current else "",
        pause=str(pause) if pause else "",
    )


def _loss(tx: Connection, version: Any) -> VersionLoss | None:
    """Return the loss of a version on the held-out data, or else the loss that its contributors report."""
    if version.heldout_after is not None:
        return VersionLoss(version.server_round, version.heldout_after, "held-out", version.heldout_before)
    merged = (updates.c.server_round == version.server_round) & (updates.c.verdict == "merged")
    losses = []
    for manifest in tx.scalars(select(updates.c.manifest).where(merged)):
        loss = json.loads(manifest).get("metrics", {}).get("train_loss")
        if isinstance(loss, (int, float)):
            losses.append(float(loss))
    if not losses:
        return None
    return VersionLoss(
        version.server_round, statistics.median(losses), f"median of {len(losses)}, self-reported"
    )


def _progress(text: str) -> tuple[str, int, int]:
    phase, _, counts = text.rpartition(" ")
    done, _, total = counts.partition("/")
    return phase, whole_number(done, 20) or 0, whole_number(total, 20) or 0
