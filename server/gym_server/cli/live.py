"""The live display of a running hub: contributors, training progress, missing updates, verdicts and losses.

It polls the database a few times a second and reports changes. The rounds do not depend on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.text import counted, plain
from gym_server.cli.snapshot import Snapshot, TaskProgress, read_snapshot
from gym_server.state import HubState

if TYPE_CHECKING:
    from rich.console import RenderableType
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.lease_history import LeaseHistoryCache

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("gym_server")

_POLL_SECONDS = 0.5
_STEPS = 4
"""Number of progress lines per task, where output is printed as lines."""
_MAX_LINES = 20
"""Maximum number of lines per poll; if a thousand contributors join at once, only their number is reported."""


@dataclass(frozen=True)
class HubEvent:
    """A change to report."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def changes(before: Snapshot, now: Snapshot) -> list[HubEvent]:
    """Return the changes between two snapshots, as events for the coordinator."""
    events = [
        HubEvent("joined", f"{_shown(name)} joined", {"contributor": who, "name": name})
        for who, name in now.members.items()
        if who not in before.members
    ]
    if now.pause != before.pause:
        kind, text = ("paused", now.pause) if now.pause else ("resumed", "the pause is over")
        events.append(HubEvent(kind, text, {"reason": now.pause}))
    if now.version < before.version:
        text = f"version {now.version} is the current one again; the next round starts from it"
        events.append(HubEvent("rollback", text, {"version": now.version, "from": before.version}))
    events += _verdicts(before, now, over=True)
    if now.merge and _phase(now) != _phase(before):
        text, phase = f"round {now.server_round}: merging: {now.merge}", _phase(now)[1]
        events.append(HubEvent("merging", text, {"server_round": now.server_round, "phase": phase}))
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
    """Return new verdicts and losses, of ended rounds if ``over`` is True, else of the current round."""
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
    for height, version in now.losses.items():
        number = version.server_round
        if height and (number < now.server_round) is over and height not in before.losses:
            fields = {"version": height, **version._asdict()}
            if version.before is None:
                loss = f"loss {_loss_shown(version.loss)}, {version.source}"
            else:
                loss = f"{version.source} {version.before:.3f} -> {version.loss:.3f}"
            events.append(HubEvent("version", f"version {height} (round {number}): {loss}", fields))
    return events


def line_console() -> Console:
    """Return the console for output lines, which is the live region's console if both are on one terminal.

    The region is redrawn below the text that is written to its console.
    """
    from gym_fed.core.console import err, out

    return err if out.is_terminal and err.is_terminal else out


class Watcher(AbstractContextManager["Watcher"]):
    """Reports changes of a hub from a separate thread while the block runs.

    Args:
        lease_histories: The earlier tasks of contributors.
        on_event: Called with every event; None disables reporting.
        console: Console of a terminal that shows the state at its bottom; None disables the display.
        footer: Lines below that state; lines may be added while the block runs.
    """

    def __init__(
        self,
        state: HubState,
        config: ServerConfig,
        lease_histories: LeaseHistoryCache,
        on_event: Callable[[HubEvent], None] | None,
        console: Console | None,
        footer: Sequence[str] = (),
    ) -> None:
        self._state, self._config = state, config
        self._lease_histories = lease_histories
        self._on_event = on_event
        self._console = console
        self._footer = footer
        self._is_blind = False
        """True while the database is unreachable, so that the failure is logged only once."""
        self._before = Snapshot()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._before = self._read(None) or Snapshot()  # changes before the thread starts are reported too
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
            region(before, self._footer),
            console=self._console,
            transient=True,
            redirect_stderr=False,
            redirect_stdout=False,
        ) as live:
            while not self._ended.wait(_POLL_SECONDS):
                before = self._step(before)
                live.update(region(before, self._footer))

    def _step(self, before: Snapshot) -> Snapshot:
        now = self._read(before)
        if now is None:
            return before
        events = changes(before, now)
        if self._on_event is not None:
            for event in events[:_MAX_LINES]:
                self._on_event(event)
            more = len(events) - _MAX_LINES
            if more > 0:
                self._on_event(HubEvent("more", f"and {counted(more, 'more change')}", {"number": more}))
        return now

    def _read(self, before: Snapshot | None) -> Snapshot | None:
        try:
            snapshot = read_snapshot(self._state, self._config, self._lease_histories, before)
        except (
            SQLAlchemyError,
            StoreUnavailable,
        ) as error:  # the hub continues; the display keeps the last state
            if not self._is_blind:
                log.warning("cannot show the state, retrying: %s", error)
            self._is_blind = True
            return None
        self._is_blind = False
        return snapshot


def _phase(now: Snapshot) -> tuple[int, str]:
    """Return the round and the phase of its merge, without the number of steps."""
    return now.server_round, now.merge.partition(",")[0]


def _step(task: TaskProgress) -> tuple[str, int]:
    return task.phase, _STEPS * min(task.done, task.total) // task.total if task.total else 0


def _shown(name: str) -> str:
    return plain(name, 24)


MAX_SHOWN = 12
"""Maximum number of contributors in the region; the others are counted."""
_LOSSES = 6
"""Number of newest versions whose loss is shown, in addition to the base's."""


def region(now: Snapshot, footer: Sequence[str] = ()) -> RenderableType:
    """Render the state as a few lines, which a narrow terminal truncates.

    Args:
        now: The snapshot to show.
        footer: Lines below the state.
    """
    from rich.text import Text

    lines = [_headline(now)]
    if now.pause:
        lines.append(f"  {plain(now.pause)}")
    if now.server_round:
        lines.append(f"  {now.connected} connected, {len(now.tasks)} asked, {now.awaited} awaited")
    tasks = sorted(now.tasks.values(), key=lambda task: (bool(task.outcome), task.name))
    lines += [f"  {plain(task.name, 24):<24} {_progress(task)}" for task in tasks[:MAX_SHOWN]]
    if len(tasks) > MAX_SHOWN:
        lines.append(f"  and {len(tasks) - MAX_SHOWN} more")
    lines += _losses(now)
    lines += [f"  {line}" for line in footer]
    return Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")


def _loss_shown(loss: float) -> str:
    """Format a loss with four decimals, or with three significant digits if it is very large."""
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def _headline(now: Snapshot) -> str:
    if not now.server_round:
        return f"{counted(len(now.members), 'account')}, {now.connected} connected; no round yet"
    text = f"round {now.server_round} ({now.committed} of {now.num_rounds} committed) {now.state}"
    if now.state in ("open", "collecting"):
        text += f": {now.admitted} of {counted(now.quorum, 'update')}"
    if now.state == "collecting" and now.deadline is not None:
        text += f", {max(0, now.deadline - now.seen_at):.0f} s left"
    if now.merge:
        text += f": {now.merge}"
    return f"{text}: {plain(now.reason)}" if now.reason else text


def _progress(task: TaskProgress) -> str:
    share = (
        f"{100 * min(task.done, task.total) // task.total:>4} %" if task.total and not task.outcome else ""
    )
    return f"{plain(task.text, 40):<32}{share}".rstrip()


def _losses(now: Snapshot) -> list[str]:
    """Return the losses of the newest versions, oldest first, and the source of the last one."""
    heights = sorted(height for height in now.losses if height)[-_LOSSES:]
    if not heights:
        return []
    if 0 in now.losses:
        heights.insert(0, 0)
    figures = " ".join(_loss_shown(now.losses[height].loss) for height in heights)
    which = "version" if len(heights) == 1 else "versions"
    return [f"  loss of {which} {_spans(heights)}: {figures}", f"  ({now.losses[heights[-1]].source})"]


def _spans(heights: Sequence[int]) -> str:
    """Format ascending numbers, with ranges for consecutive ones, such as `1, 4 to 6`."""
    spans: list[list[int]] = []
    for height in heights:
        if spans and spans[-1][-1] == height - 1:
            spans[-1] = [spans[-1][0], height]
        else:
            spans.append([height])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
