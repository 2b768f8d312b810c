"""Write metrics as JSON lines: ``metrics.jsonl``, and ``performance.jsonl`` for those that vary between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.core.files import drop_torn_line, write_atomically
from gym_fed.tracking.trackers.base import RunInfo, Tracker, read_lines

PERFORMANCE = "performance/"
"""Name prefix of metrics that vary between equal runs (speed, memory), which are therefore not in ``metrics.jsonl``."""


class Jsonl(Tracker):
    """Write JSON lines; ``metrics.jsonl`` of two runs with one config are identical."""

    def open(self, run: RunInfo) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = run.folder / "metrics.jsonl"
        self._performance = run.folder / "performance.jsonl"
        self._artifacts = run.folder / "artifacts.jsonl"
        for file in (self._metrics, self._performance, self._artifacts):
            drop_torn_line(file)
        if run.from_step is not None:
            for file in (self._metrics, self._performance):
                _cut(file, run.from_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        known = {key: value for key, value in metrics.items() if not key.startswith(PERFORMANCE)}
        timed = {
            key.removeprefix(PERFORMANCE): v for key, v in metrics.items() if key.startswith(PERFORMANCE)
        }
        for file, values in ((self._metrics, known), (self._performance, timed)):
            if values:
                _append(file, {"step": step, **values})

    def log_artifacts(self, paths: Sequence[Path]) -> None:
        logged = [line["path"] for line in read_lines(self._artifacts)]
        for path in paths:
            if str(path) not in logged:
                _append(self._artifacts, {"path": str(path)})

    def close(self) -> None:
        """Do nothing: every line is written immediately."""


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def _cut(file: Path, last_step: int) -> None:
    """Drop the lines of steps that will be repeated."""
    earlier = [line for line in read_lines(file) if line["step"] <= last_step]
    write_atomically(file, "".join(f"{json.dumps(line)}\n" for line in earlier).encode("utf-8"))
