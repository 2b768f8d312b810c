"""Results of runs, in memory and read from run folders, without importing torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import read_lines

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.evaluation.retention import Retention
    from gym_fed.training.private.plan import Plan

_ACTIVE_SECONDS = 120
_MAX_BYTES = 1 << 30
"""Maximum size of a run's file, which is read as a whole."""
"""Maximum age in seconds of the metrics of a running run, if file locks are not supported."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: Number of optimiser steps of the whole run, including those before a resume.
        final_loss: Mean loss of the last ``logging_steps`` steps, 10 by default, in nats per token.
        losses: Loss of every step.
        history: Log entries of every step (``reward``, ``rewards/margins``, ``kl``, ``eval_loss``, ...).
        output_dir: The run folder.
        num_examples: Number of distinct rows with labels.
        rows: Counts of learned, truncated and dropped rows.
        num_processes: Number of processes of the run.
        num_tokens: Number of tokens seen, including repeats and excluding padding.
        model: The trained model, in evaluation mode: the given model, or a PEFT model around it.
        tokenizer: The tokenizer of the model.
        best_step: Step of the weights, under ``early_stopping.restore_best``; None for the last step.
        epsilon: Privacy cost of the run at ``target_delta``, under ``privacy``; otherwise None.
        privacy: The privacy plan of the run.
        check: Gains and losses, if the run was checked.
    """

    steps: int
    final_loss: float
    losses: list[float]
    history: list[dict[str, float]] = field(repr=False)
    output_dir: Path
    num_examples: int
    num_tokens: int
    num_processes: int
    model: Any = field(repr=False, compare=False)
    tokenizer: Any = field(repr=False, compare=False)
    best_step: int | None = None
    epsilon: float | None = None
    privacy: Plan | None = field(default=None, repr=False)
    rows: RowCounts | None = None
    check: CheckResult | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """Return the metrics as JSON values, without ``losses`` and objects."""
        keys = ("steps", "final_loss", "num_examples", "num_tokens", "num_processes")
        values: dict[str, Any] = {key: getattr(self, key) for key in keys}
        if self.check is not None:
            values["check"] = self.check.as_dict()
        if self.rows is not None:
            values["rows"] = self.rows.as_dict()
        if self.best_step is not None:
            values["best_step"] = self.best_step
        if self.privacy is not None:
            values |= {"epsilon": self.epsilon, "privacy": vars(self.privacy)}
        return {**values, "output_dir": str(self.output_dir)}


@dataclass(frozen=True)
class CheckResult:
    """The result of the learning check: what the model has gained and lost in a run.

    Attributes:
        held_out: Loss on held-out rows; None if there are none.
        retention: Results on the retention set; None if the base does not know the retention set.
        prompts: The user's prompts that were answered.
        before: Answers to the prompts before training; one that was cut ends with an ellipsis.
        after: Answers to the prompts after training, likewise.
        warnings: Warnings for the user, with remedies.
        skipped: Parts that were not checked, with the reasons.
        expected: Reference answers to the prompts, from the rows.
    """

    held_out: HeldOut | None
    retention: Retention | None
    prompts: list[str]
    before: list[str]
    after: list[str]
    warnings: list[str]
    skipped: list[str]
    expected: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        values = asdict(self)
        if self.retention is not None:
            values["retention"] = self.retention.as_dict()
        return values


@dataclass(frozen=True)
class HeldOut:
    """The loss on held-out rows: the mean over rows of each row's nats per token.

    Attributes:
        num_rows: Number of measured rows.
        before: Mean loss before training.
        after: Mean loss after training.
        stderr: Standard error of ``after - before``, paired by row; None if only the means are known.
    """

    num_rows: int
    before: float
    after: float
    stderr: float | None


def list_run_folders(root: Path) -> list[Path]:
    """Return every run below a folder, at any depth, sorted by path."""
    return sorted({file.parent for file in root.rglob("run.json")})


def listed(folder: Path) -> dict[str, Any]:
    """Return the summary of a folder. For an unreadable one, return a placeholder with the reason."""
    try:
        return summary(folder)
    except (GymError, TypeError, ValueError, LookupError, AttributeError, OSError) as error:
        reason = f"{folder} contains a result that was not written by a run"
        return {
            "folder": str(folder),
            "status": "unreadable",
            "why": error.message if isinstance(error, GymError) else reason,
            "algorithm": "",
            "model": "",
            "steps": 0,
            "figures": {},
            "changed": folder.stat().st_mtime,
        }


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run folder.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is no run.
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
    from gym_fed.training.run.folder import is_held  # the import loads numpy

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
    _require_readable(file)
    try:
        lines = read_lines(file)
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} contains a line that is not JSON") from error
    if not all(isinstance(line, dict) for line in lines):
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} contains a line that is not a JSON object")
    return lines


def read_run_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run.

    Raises:
        GymError: See ``read_run_config`` and ``read_metrics``.
    """
    read_run_config(run)  # refuses a folder without a run
    return read_metrics(run / "metrics.jsonl")


def read_json(file: Path) -> Any:
    """Return the content of a run's JSON file; None if the file does not exist.

    Raises:
        GymError: ``STATE_CORRUPT`` if it is not valid JSON.
    """
    if not file.exists():
        return None
    _require_readable(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} is not JSON") from error


def _require_readable(file: Path) -> None:
    """Refuse a path that is not a regular file, since opening a named pipe would block, and one that is too large."""
    if file.exists() and not file.is_file():
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} is not a regular file")
    if file.exists() and file.stat().st_size > _MAX_BYTES:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} is larger than {_MAX_BYTES:,} bytes")
