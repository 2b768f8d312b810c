"""A stock SuperLink with many SuperNodes, each of which returns updates as large as those of the crowd."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from _processes import Processes

from _flower_peer import role_of, start_federation

CROWD_APP = Path(__file__).parent / "crowd_app"
_START_SECONDS, _ROUND_SECONDS = 900.0, 600.0
_SAMPLE_SECONDS = 2.0


@dataclass(frozen=True)
class SuperLinkCrowd:
    """What a SuperLink and its nodes took.

    Attributes:
        nodes: SuperNodes that took part in every round.
        rounds: Number of rounds.
        round_seconds: The median of the rounds.
        cpu_seconds: Processor time of the SuperLink and its ServerApp in the rounds.
        node_cpu_seconds: Processor time of the SuperNodes and their ClientApps in the rounds.
        peak_bytes: Peak memory of the SuperLink and its ServerApp.
        start_seconds: Time until all nodes were connected.
    """

    nodes: int
    rounds: int
    round_seconds: float
    cpu_seconds: float
    node_cpu_seconds: float
    peak_bytes: float
    start_seconds: float

    def figures(self) -> dict[str, float]:
        """Return what is compared with a hub, in the units of its table."""
        return {
            "members": self.nodes,
            "update": 1000 * self.cpu_seconds / (self.nodes * self.rounds),
            "memory": self.peak_bytes / 1e6,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return what has no counterpart, for a table."""
        per_update = self.node_cpu_seconds / (self.nodes * self.rounds)
        return [
            ("start of all nodes", f"{self.start_seconds:.0f} s"),
            ("median round", f"{self.round_seconds:.1f} s"),
            ("nodes: CPU per update", f"{per_update:.2f} s"),
        ]


def measure_superlink(
    nodes: int, rounds: int, update_bytes: int, think_seconds: float, core: int | None
) -> SuperLinkCrowd:
    """Run rounds with every SuperNode. The ServerApp merges nothing, and nothing is stored on disk, as stock.

    Args:
        nodes: Number of SuperNodes, each a process, with a process per task.
        rounds: Number of rounds.
        update_bytes: Size of an update.
        think_seconds: Mean time of a task.
        core: The core of the SuperLink; None for all.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gym-superlink-") as name,
        Processes(Path(name), role_of, _SAMPLE_SECONDS) as processes,
    ):
        result, began = Path(name) / "result.json", time.monotonic()
        task = f"update-bytes={update_bytes} think-seconds={float(think_seconds)}"
        settings = f'nodes={nodes} rounds={rounds} {task} result="{result}"'
        superlink = start_federation(processes, CROWD_APP, settings, nodes, core)
        processes.wait_for("nodes", result.with_suffix(".started").exists, _START_SECONDS)
        start_seconds, before, all_before = time.monotonic() - began, cpu(superlink), cpu(psutil.Process())
        processes.wait_for("result", result.exists, rounds * _ROUND_SECONDS)
        spent, spent_by_all = cpu(superlink) - before, cpu(psutil.Process()) - all_before
        peak = processes.peak_rss_mb["SuperLink"] + processes.peak_rss_mb["ServerApp"]
        seconds = statistics.median(json.loads(result.read_text()))
        return SuperLinkCrowd(nodes, rounds, seconds, spent, spent_by_all - spent, peak * 1e6, start_seconds)


def cpu(root: psutil.Process) -> float:
    """Return the processor time of a process and all below it, those that have ended too."""
    seconds = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
