"""Live display of a running hub: who joined, who trains and how far, who is awaited, verdicts, losses.

An observer that reads the database a few times a second and reports what changed; the rounds know nothing of it.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.text import plain, readable_bytes, whole_number
from gym_server.federation import Federation
from gym_server.store.away import StoreAway
from gym_server.store.tables import accounts, messages, nodes, round_tasks, rounds, updates, versions

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

log = logging.getLogger("gym_server")

_POLL_SECONDS = 0.5
_STEPS = 4
"""Into how many parts a task's progress is reported, where lines are written."""
_COUNTED_IN_BYTES = ("fetch", "upload")
_MAX_LINES = 20
"""Of one look at the database; a thousand contributors that join at once are reported as a number."""
_MAX_SHOWN = 12
"""Contributors in the live region; the others are counted."""


@dataclass(frozen=True)
class TaskProgress:
    """What one contributor does in the round under way."""

    name: str
    outcome: str
    """Empty while it is awaited, else replied, failed or lost."""
    phase: str = ""
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        if self.outcome:
            return self.outcome
        if not self.phase:
            return "not begun"
        if not self.total:
            return self.phase
        if self.phase in _COUNTED_IN_BYTES:
            return f"{self.phase} {readable_bytes(self.done)} of {readable_bytes(self.total)}"
        return f"{self.phase} {self.done}/{self.total}"


@dataclass(frozen=True)
class Snapshot:
    """The hub at one moment. Names are as their owners wrote them."""

    server_round: int = 0
    state: str = ""
    deadline: float | None = None
    tasks: dict[int, TaskProgress] = field(default_factory=dict)
    """By node."""
    members: dict[str, str] = field(default_factory=dict)
    """Names of accounts, by id."""
    connected: int = 0
    verdicts: dict[str, tuple[int, str, str, str]] = field(default_factory=dict)
    """Of each update of the round and the one before: round, contributor, verdict, reason."""
    losses: dict[int, tuple[int, float, str]] = field(default_factory=dict)
    """Of each of the last versions: its round, the loss, and where that is from."""


@dataclass(frozen=True)
class HubEvent:
    """Something that changed."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def look(fed: Federation) -> Snapshot:
    """Read the hub's state; changes nothing and waits for no writer."""
    now = time.time()
    with fed.database.reading() as tx:
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
        made = tx.execute(select(versions).order_by(versions.c.height.desc()).limit(2)).all()
    return Snapshot(
        number,
        current.state if current else "",
        current.deadline if current else None,
        tasks,
        members,
        len({row.contributor for row in owners.values() if row.connected_until > now}),
        {row.update_id: (row.server_round, row.contributor, row.verdict, row.reason) for row in sent},
        {row.height: found for row in made if (found := _loss(row, sent)) is not None},
    )


def changes(before: Snapshot, now: Snapshot) -> list[HubEvent]:
    """What a coordinator would want to hear of."""
    events = [
        HubEvent("joined", f"{_shown(name)} joined", {"contributor": who, "name": name})
        for who, name in now.members.items()
        if who not in before.members
    ]
    events += _verdicts(before, now, over=True)
    same = before.server_round == now.server_round
    for node, task in now.tasks.items():
        was = before.tasks.get(node) if same else None
        if task.outcome in ("failed", "lost") and (was is None or was.outcome != task.outcome):
            what = f" {task.outcome}"
        elif not task.outcome and task.phase and (was is None or _step(was) != _step(task)):
            what = f": {task.text}"
        else:
            continue
        text = f"round {now.server_round}: {_shown(task.name)}{what}"
        events.append(HubEvent("task", text, {"server_round": now.server_round, **asdict(task)}))
    return events + _verdicts(before, now, over=False)


def _verdicts(before: Snapshot, now: Snapshot, over: bool) -> list[HubEvent]:
    """New verdicts and losses: of rounds that are ``over``, or of the present one."""
    events = []
    for update, (number, who, verdict, reason) in now.verdicts.items():
        known = before.verdicts.get(update)
        if (number < now.server_round) is over and (known is None or known[2] != verdict):
            why = f": {plain(reason)}" if reason else ""
            name = now.members.get(who, who)
            fields = {
                "server_round": number,
                "contributor": who,
                "name": name,
                "verdict": verdict,
                "reason": reason,
            }
            events.append(HubEvent("verdict", f"round {number}: {_shown(name)} {verdict}{why}", fields))
    for height, (number, loss, source) in now.losses.items():
        if (number < now.server_round) is over and height not in before.losses:
            fields = {"server_round": number, "version": height, "loss": loss, "source": source}
            text = f"version {height} (round {number}): loss {_loss_shown(loss)}, {source}"
            events.append(HubEvent("version", text, fields))
    return events


def region(now: Snapshot) -> RenderableType:
    """The state in a few lines, for the bottom of a terminal."""
    from rich.text import Text

    lines = [_headline(now)]
    tasks = sorted(now.tasks.values(), key=lambda task: (bool(task.outcome), task.name))
    lines += [f"  {_shown(task.name):<16} {plain(task.text, 40)}" for task in tasks[:_MAX_SHOWN]]
    if len(tasks) > _MAX_SHOWN:
        lines.append(f"  and {len(tasks) - _MAX_SHOWN} more")
    return Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")


def line_console() -> Console:
    """Where a line goes that belongs on standard output: above the region, where both are on one terminal.

    The region is drawn anew over whatever else is written to its terminal.
    """
    from gym_fed.console import err, out

    return err if out.is_terminal and err.is_terminal else out


class Watcher(AbstractContextManager["Watcher"]):
    """Reports, from a thread of its own, what changes at a hub while the block runs.

    Args:
        fed: The hub; its database is only read.
        on_event: Called with every event; None for nobody.
        console: A terminal that keeps the state at its bottom; None for none.
    """

    def __init__(
        self, fed: Federation, on_event: Callable[[HubEvent], None] | None, console: Console | None
    ) -> None:
        self._fed = fed
        self._on_event = on_event
        self._console = console
        self._is_blind = False
        """Whether the database is away, which the log says once."""
        self._before = Snapshot()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._before = self._look() or Snapshot()  # what changes before the thread runs is reported, too
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        before = self._before
        if self._console is None:
            while not self._ended.wait(_POLL_SECONDS):
                before = self._step(before)
            self._step(before)
            return
        from rich.live import Live

        with Live(
            region(before),
            console=self._console,
            transient=True,
            redirect_stderr=False,
            redirect_stdout=False,
        ) as live:
            while not self._ended.wait(_POLL_SECONDS):
                before = self._step(before)
                live.update(region(before))

    def _step(self, before: Snapshot) -> Snapshot:
        now = self._look()
        if now is None:
            return before
        events = changes(before, now)
        if self._on_event is not None:
            for event in events[:_MAX_LINES]:
                self._on_event(event)
            more = len(events) - _MAX_LINES
            if more > 0:
                self._on_event(HubEvent("more", f"and {more} more changes", {"number": more}))
        return now

    def _look(self) -> Snapshot | None:
        try:
            found = look(self._fed)
        except (SQLAlchemyError, StoreAway) as error:  # the hub continues; the display keeps the last state
            if not self._is_blind:
                log.warning("cannot show the state, and keeps trying: %s", error)
            self._is_blind = True
            return None
        self._is_blind = False
        return found


def _headline(now: Snapshot) -> str:
    if not now.server_round:
        return f"{len(now.members)} accounts, {now.connected} connected; no round yet"
    awaited = sum(not task.outcome for task in now.tasks.values())
    text = f"round {now.server_round} {now.state}: {now.connected} connected, {len(now.tasks)} asked, {awaited} awaited"
    left = None if now.deadline is None else now.deadline - time.time()
    if left is not None and now.state == "collecting":
        text += f", {max(0, left):.0f} s to the deadline"
    return text


def _loss(version: Any, sent: Any) -> tuple[int, float, str] | None:
    """Of a version: by the held-out data, else what its contributors say of their own training."""
    if version.heldout_after is not None:
        return version.server_round, version.heldout_after, "held-out"
    losses = []
    for row in sent:
        if row.server_round == version.server_round and row.verdict == "merged":
            loss = json.loads(row.manifest).get("metrics", {}).get("train_loss")
            if isinstance(loss, (int, float)):
                losses.append(float(loss))
    if not losses:
        return None
    return version.server_round, statistics.median(losses), f"median of {len(losses)}, self-reported"


def _progress(text: str) -> tuple[str, int, int]:
    phase, _, counts = text.rpartition(" ")
    done, _, total = counts.partition("/")
    return phase, whole_number(done, 20) or 0, whole_number(total, 20) or 0


def _step(task: TaskProgress) -> tuple[str, int]:
    return task.phase, _STEPS * min(task.done, task.total) // task.total if task.total else 0


def _shown(name: str) -> str:
    return plain(name, 24)


def _loss_shown(loss: float) -> str:
    """Four decimals; a number that nobody's loss has, as contributors may report one, in few characters."""
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.3g}"
