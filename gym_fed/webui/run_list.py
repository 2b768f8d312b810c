"""The runs below the folder of runs, each as one line; a run whose files have not changed is not read again."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.training.run.folder_lock import is_held
from gym_fed.training.run.summary import listed
from gym_fed.webui.curves import CurvesOfRuns, thinned
from gym_fed.webui.plain import plain, text

MAX_RUNS = 5000
"""That are looked at; those by path behind them are not listed."""
_SPARK_POINTS = 40
_PRUNED = ("checkpoints", "best", "tensorboard")
_STAMPED = ("config.yaml", "metrics.jsonl", "result.json", "run.json")


@dataclass
class _Known:
    stamp: tuple[Any, ...]
    line: dict[str, Any]


class RunList:
    """Lines of all runs; from any thread.

    Args:
        root: The folder of runs.
        curves: Where the curves of runs are read.
    """

    def __init__(self, root: Path, curves: CurvesOfRuns) -> None:
        self._root, self._curves = root, curves
        self._known: dict[Path, _Known] = {}
        self._lock = threading.Lock()

    def lines(self) -> list[dict[str, Any]]:
        """Every run, the newest first: ``{path, status, algorithm, model, steps, figures, changed, spark}``."""
        with self._lock:
            found = {folder: self._line(folder) for folder in self._folders()}
            self._known = {folder: self._known[folder] for folder in found}
        return sorted(found.values(), key=lambda line: line["changed"], reverse=True)

    def line(self, folder: Path) -> dict[str, Any]:
        """One run's line."""
        with self._lock:
            return self._line(folder)

    def _folders(self) -> list[Path]:
        found = []
        for place, folders, files in os.walk(self._root):
            folders[:] = sorted(name for name in folders if name not in _PRUNED and not name.startswith("."))
            if "run.json" in files:
                found.append(Path(place))
                if len(found) >= MAX_RUNS:
                    break
        return found

    def _line(self, folder: Path) -> dict[str, Any]:
        stamp = (*(_stamp(folder / name) for name in _STAMPED), is_held(folder))
        known = self._known.get(folder)
        if known is None or known.stamp != stamp:
            known = self._known[folder] = _Known(stamp, self._read(folder))
        return known.line

    def _read(self, folder: Path) -> dict[str, Any]:
        line = listed(folder)
        losses = self._curves.of(folder).series.get("loss")
        points = [] if losses is None else list(zip(losses.steps, losses.values, strict=True))
        return {
            "path": text(folder.relative_to(self._root).as_posix()),
            "status": line["status"],
            "why": text(line.get("why", "")),
            "algorithm": text(line["algorithm"]),
            "model": text(line["model"]),
            "steps": plain(line["steps"]),
            "figures": plain(line["figures"]),
            "changed": line["changed"],
            "spark": [value for _, value in thinned(points, _SPARK_POINTS) if value is not None],
        }


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
