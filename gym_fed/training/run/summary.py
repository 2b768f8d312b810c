"""Summaries of run folders, read from their files, for `gym runs` and the pages of `gym webui`. No torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import read_lines
from gym_fed.training.run.folder import is_held

_ACTIVE_SECONDS = 120
"""Without support for locks, a run without a result counts as running while its metrics are not older."""


def list_run_folders(root: Path) -> list[Path]:
    """Return every run below a folder, at any depth, by path."""
    return sorted({file.parent for file in root.rglob("run.json")})


def listed(folder: Path) -> dict[str, Any]:
    """Return the summary, or a replacement for an unreadable folder, so that one such hides no others."""
    try:
        return summary(folder)
    except (GymError, TypeError, ValueError, AttributeError, OSError) as error:
        reason = error.message if isinstance(error, GymError) else f"{folder}: holds what no run has written"
        return {
            "folder": str(folder),
            "status": "unreadable",
            "why": reason,
            "algorithm": "",
            "model": "",
            "steps": 0,
            "figures": {},
            "changed": folder.stat().st_mtime,
        }


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run folder.

    Raises:
        GymError: ``FILE_NOT_FOUND`` where there is no run.
    """
    config = read_run_config(folder)
    figures: dict[str, float] = {}
    steps = 0
    for line in read_run_metrics(folder):
        steps = max(steps, line.get("step", 0))
        figures.update({key: value for key, value in line.items() if key != "step"})
    result = read_json(folder / "result.json")
    if result is not None:
        steps = result.get("steps", steps)
        figures.update({key: result[key] for key in ("final_loss", "best_step", "epsilon") if key in result})
        if "privacy" in result:
            figures["target_delta"] = result["privacy"]["target_delta"]
    files = [folder / "metrics.jsonl", folder / "result.json", folder / "config.yaml"]
    changed = max(file.stat().st_mtime for file in files if file.exists())
    saved = [f.name.rpartition("-")[2] for f in folder.glob("checkpoints/checkpoint-*")]
    steps = max(steps, *(int(step) for step in saved if step.isdecimal()), 0)
    is_running = is_held(folder)
    status = "running" if is_running else "unfinished"
    if is_running is None and time.time() - changed < _ACTIVE_SECONDS:
        status = "running?"
    return {
        "folder": str(folder),
        "status": "finished" if result is not None else status,
        "algorithm": config.get("algorithm", ""),
        "model": str(config.get("model") or "from random weights"),
        "steps": steps,
        "figures": figures,
        "changed": changed,
    }


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; empty if it does not exist yet."""
    _require_no_pipe(file)
    try:
        lines = read_lines(file)
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file}: holds a line that is not JSON") from error
    if not all(isinstance(line, dict) for line in lines):
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file}: holds a line without names")
    return lines


def read_run_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run.

    Raises:
        GymError: As ``read_run_config`` and ``read_metrics``.
    """
    read_run_config(run)  # refuses a folder without a run
    return read_metrics(run / "metrics.jsonl")


def read_json(file: Path) -> Any:
    """Return the document of a run's JSON file; None without one.

    Raises:
        GymError: ``STATE_CORRUPT``.
    """
    if not file.exists():
        return None
    _require_no_pipe(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file}: is not JSON") from error


def _require_no_pipe(file: Path) -> None:
    """Refuse a path that is not a file: opening a named pipe would wait for a writer."""
    if file.exists() and not file.is_file():
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file}: is not a regular file")
