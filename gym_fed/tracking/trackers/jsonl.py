"""Write a run's record to its folder: JSON lines of metrics and artifacts, ``config.yaml`` and ``environment.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.files import (
    atomic_file,
    copy_hashed,
    drop_torn_line,
    file_sha256,
    real_path,
    write_atomically,
)
from gym_fed.tracking.environment import machine_facts
from gym_fed.tracking.trackers.base import RunInfo, Tracker, read_lines

PERFORMANCE = "performance/"
"""Name prefix of metrics that vary between equal runs (speed, memory), which are therefore not in ``metrics.jsonl``."""


class Jsonl(Tracker):
    """Write JSON lines; ``metrics.jsonl`` of two runs with one config are identical.

    Files outside the run folder are copied to ``artifacts/``, since they may change later. A file named like an earlier
    one is copied under its digest, too.
    """

    def open(self, run: RunInfo) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = run.folder / "metrics.jsonl"
        self._performance = run.folder / "performance.jsonl"
        self._artifacts = run.folder / "artifacts.jsonl"
        self._folder = run.folder
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

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.yaml`` and ``environment.json``; the folder of a training run has its own."""
        if (self._folder / "run.json").exists():
            return
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        write_atomically(self._folder / "config.yaml", text.encode())
        record = {"environment": machine_facts(), "resumed_with": []}
        write_atomically(self._folder / "environment.json", f"{json.dumps(record, indent=2)}\n".encode())

    def log_artifacts(self, paths: Sequence[Path]) -> None:
        logged = {(line["path"], line.get("sha256")) for line in read_lines(self._artifacts)}
        for path in paths:
            if self._contains(path):
                if (str(path), None) not in logged:
                    _append(self._artifacts, {"path": str(path)})
                continue
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not file.is_file() or self._contains(file):
                    continue
                digest = file_sha256(file)
                if (str(file), digest) not in logged:
                    copy = self._copy(file, file.relative_to(path.parent), digest)
                    _append(self._artifacts, {"path": str(file), "sha256": digest, "copy": copy})

    def _contains(self, path: Path) -> bool:
        return real_path(path).is_relative_to(real_path(self._folder))

    def _copy(self, file: Path, name: Path, digest: str) -> str:
        target = self._folder / "artifacts" / name
        if target.exists() and file_sha256(target) != digest:
            target = target.with_name(f"{target.stem}-{digest[:12]}{target.suffix}")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, atomic_file(target) as copy:
                copy_hashed(source, copy)
        return target.relative_to(self._folder).as_posix()

    def close(self) -> None:
        """Do nothing: every line is written immediately."""


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def _cut(file: Path, last_step: int) -> None:
    """Drop the lines of steps that will be repeated."""
    earlier = [line for line in read_lines(file) if line["step"] <= last_step]
    write_atomically(file, "".join(f"{json.dumps(line)}\n" for line in earlier).encode("utf-8"))
