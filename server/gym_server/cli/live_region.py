"""The lines at the bottom of a coordinator's terminal: the round, who trains and how far, losses, and who may join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gym_server.cli.snapshot import Snapshot, TaskProgress

MAX_SHOWN = 12
"""Contributors in the region; the others are counted."""
_LOSSES = 6
"""Number of newest versions whose loss is shown, in addition to the base's."""


def region(now: Snapshot, footer: Sequence[str] = ()) -> RenderableType:
    """The state in a few lines; a narrow terminal cuts them off.

    Args:
        now: What to show.
        footer: Lines that stay below it.
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


def loss_shown(loss: float) -> str:
    """Four decimals; a number that nobody's loss has, as contributors may report one, in few characters."""
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
    """The losses of the newest versions, the oldest first, and where the last one is from."""
    heights = sorted(height for height in now.losses if height)[-_LOSSES:]
    if not heights:
        return []
    if 0 in now.losses:
        heights.insert(0, 0)
    figures = " ".join(loss_shown(now.losses[height][1]) for height in heights)
    which = "version" if len(heights) == 1 else "versions"
    return [f"  loss of {which} {_spans(heights)}: {figures}", f"  ({now.losses[heights[-1]][2]})"]


def _spans(heights: Sequence[int]) -> str:
    """Ascending numbers, those in a row as one span: `1, 4 to 6`. A rollback leaves gaps."""
    spans: list[list[int]] = []
    for height in heights:
        if spans and spans[-1][-1] == height - 1:
            spans[-1] = [spans[-1][0], height]
        else:
            spans.append([height])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
