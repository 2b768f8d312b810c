"""Read training curves while their files grow, and thin them for display.

Only data appended since the last read is parsed. A file that was truncated, for example by a resumed run that repeats
steps, is reread.
"""

from __future__ import annotations

import json
import math
import stat
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_POINTS = 2000
"""Maximum number of points per series in a response."""
MAX_SERIES = 64
"""Maximum number of series per run, in the order of logging."""
_MAX_READ_BYTES = 256 * 2**20
"""Maximum number of bytes read from one file; later values are not drawn."""
_MAX_NAME = 120
_KEPT_RUNS = 32
_TAIL_BYTES = 64
ELAPSED = "performance/elapsed_seconds"
"""Name of the series of seconds since the first step, summed over the lines of ``performance.jsonl``."""

Point = tuple[int, float | None]
"""Step and value; None if the value is not finite."""


@dataclass
class Series:
    """One metric over steps, in the order of logging."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def points(
        self,
        *,
        since: int | None = None,
        low: float = -math.inf,
        high: float = math.inf,
        most: int = MAX_POINTS,
    ) -> list[Point]:
        """Return the points from a step on and within a range of steps, thinned to ``most``."""
        first = 0 if since is None else self._first_from(since)
        chosen = [i for i in range(first, len(self.steps)) if low <= self.steps[i] <= high]
        return thinned([(self.steps[i], self.values[i]) for i in chosen], most)

    def _first_from(self, step: int) -> int:
        """Return the index of the first point of ``step`` or a later one, searching from the end."""
        at = len(self.steps)
        while at and self.steps[at - 1] >= step:
            at -= 1
        return at


def thinned(points: list[tuple[int, float]], most: int = MAX_POINTS) -> list[Point]:
    """Thin a series to ``most`` points that keep every spike: the minimum and maximum of each part, and both ends.

    A part with a value that is not finite also contributes a None.
    """
    if len(points) <= most:
        return [_point(point) for point in points]
    inner, parts = points[1:-1], max(1, (most - 2) // 3)
    result = [_point(points[0])]
    for part in range(parts):
        piece = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        finite = [i for i, (_, value) in enumerate(piece) if math.isfinite(value)]
        indices = {next((i for i, (_, value) in enumerate(piece) if not math.isfinite(value)), None)}
        if finite:
            indices |= {min(finite, key=lambda i: piece[i][1]), max(finite, key=lambda i: piece[i][1])}
        result += [_point(piece[i]) for i in sorted(i for i in indices if i is not None)]
    return [*result, _point(points[-1])]


def _point(point: tuple[int, float]) -> Point:
    step, value = point
    return step, value if math.isfinite(value) else None


class RunCurves:
    """The metrics of one run, from ``metrics.jsonl`` and ``performance.jsonl``.

    Attributes:
        series: Series by name; names from ``performance.jsonl`` start with ``performance/``.
        version: Counter that increases whenever new data is read.
        restarts: Number of times that the files were reread from the start.
        unreadable: Number of lines without valid metrics.
    """

    def __init__(self, folder: Path) -> None:
        self._files = [_Growing(folder / "metrics.jsonl"), _Growing(folder / "performance.jsonl")]
        self._lock = threading.Lock()
        self._reset()
        self.version = self.restarts = 0

    def update(self) -> None:
        """Read new lines."""
        with self._lock:
            news = [file.read() for file in self._files]
            if any(was_cut for _, was_cut in news):
                for file in self._files:
                    file.restart()
                self._reset()
                self.restarts += 1
                news = [file.read() for file in self._files]
            for prefix, (lines, _) in zip(("", "performance/"), news, strict=True):
                for line in lines:
                    self._take(prefix, line)
            if any(lines for lines, _ in news):
                self.version += 1

    def _reset(self) -> None:
        self.series: dict[str, Series] = {}
        self.last_step = 0
        self.unreadable = 0
        self._elapsed = 0.0

    def _take(self, prefix: str, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, RecursionError, TypeError, KeyError):
            self.unreadable += 1
            return
        if type(step) is not int or not 0 <= step < 2**53 or not isinstance(record, dict):
            self.unreadable += 1
            return
        self.last_step = max(self.last_step, step)
        for key, value in record.items():
            if key == "step" or type(value) not in (int, float):
                continue
            self._append(f"{prefix}{key[:_MAX_NAME]}", step, _as_float(value))
        seconds = record.get("seconds") if prefix else None
        if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
            self._elapsed += seconds
            self._append(ELAPSED, step, self._elapsed)

    def _append(self, name: str, step: int, value: float) -> None:
        if name not in self.series and len(self.series) >= MAX_SERIES:
            return
        series = self.series.setdefault(name, Series())
        series.steps.append(step)
        series.values.append(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer too large for float
        return math.inf


class _Growing:
    """A text file that another process appends lines to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restart()

    def restart(self) -> None:
        self._position, self._tail, self._stamp = 0, b"", (0, 0, 0)

    def read(self) -> tuple[list[bytes], bool]:
        """Return the complete lines since the last call, and True if earlier content has disappeared."""
        try:
            status = self._path.stat()
        except OSError:
            return [], self._position > 0
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would block until a writer opens it
            return [], self._position > 0
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return [], False
        with self._path.open("rb") as stream:
            stream.seek(self._position - len(self._tail))
            if stream.read(len(self._tail)) != self._tail:
                return [], True
            data = stream.read(max(0, _MAX_READ_BYTES - self._position))
        self._stamp = stamp
        complete = data[: data.rfind(b"\n") + 1]
        if complete:
            self._position += len(complete)
            self._tail = (self._tail + complete)[-_TAIL_BYTES:]
        return complete.splitlines(), False


class CurvesOfRuns:
    """The curves of recently viewed runs. Safe from any thread."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, RunCurves] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> RunCurves:
        """Return the current curves of a run."""
        with self._lock:
            curves = self._runs.setdefault(folder, RunCurves(folder))
            self._runs.move_to_end(folder)
            while len(self._runs) > _KEPT_RUNS:
                self._runs.popitem(last=False)
        curves.update()
        return curves


def last_values(series: Mapping[str, Series]) -> dict[str, Any]:
    """Return the last value of each metric that has one; None for a value that is not finite."""
    return {
        name: _point((curve.steps[-1], curve.values[-1]))[1]
        for name, curve in series.items()
        if len(curve.values)
    }
