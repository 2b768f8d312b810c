"""Evaluation records of a hub: one file per suite and version, in ``evals/`` of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.files import file_sha256
from gym_fed.core.text import counted
from gym_fed.evaluation.harness.preparation import harness_version
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, TaskResult
from gym_fed.evaluation.scoring.models import ENGINE
from gym_fed.trust.ledger.evaluations import EVALUATED
from gym_server.evaluations.runner import SuiteTasks, suite_digest
from gym_server.store.database import Database
from gym_server.store.tables import ledger


def records_folder(folder: Path) -> Path:
    """Return the folder of the records."""
    return folder / "evals"


_TEMPLATE = {True: "the model's own", False: "none", None: "as each task says"}


def identity_of(
    server: str, suite: SuiteTasks, version: str, settings: str, server_round: int | None
) -> dict[str, str]:
    """Return the fields that determine the results of a version.

    Args:
        server: Id of the hub.
        suite: The suite and its tasks.
        version: Digest of the version.
        settings: Digest of the base's settings, from ``settings_digest``.
        server_round: Round whose seed draws the rows; None if all rows or the first rows are used.
    """
    rows = f"first {suite.config.limit}" if server_round is None else f"round {server_round}"
    return {
        "model": version,
        "settings": settings,
        "delta": "none",
        "suite": suite_digest(suite.tasks),
        "template": _TEMPLATE[suite.config.apply_chat_template],
        "rows": f"{server} {rows}, limit {suite.config.limit}",
        "dtype": "float32",
        "engine": ENGINE,
        "harness": harness_version(),
    }


def write_result(
    config: ServerConfig,
    folder: Path,
    server: str,
    suite: SuiteTasks,
    tasks: Mapping[str, TaskResult],
    version: str,
    settings: str,
    server_round: int | None,
    seconds: float = 0.0,
) -> str:
    """Write one record; return the sha256 of its document, which contains the digest of its samples."""
    results = EvalResults(
        model=f"{config.public_base_name}@{version.removeprefix('sha256:')[:12]}",
        identity=identity_of(server, suite, version, settings, server_round),
        tasks=tasks,
        seconds=seconds,
        facts={"suite": suite.config.suite, "server": server},
    )
    return file_sha256(write_record(results, records_folder(folder), organization=config.name))


def last_evaluation(database: Database) -> dict[str, Any] | None:
    """Return the gate's newest evaluation: round, outcome, and a figure per task; None before the first."""
    newest = select(ledger.c.body).where(ledger.c.kind == EVALUATED).order_by(ledger.c.sequence.desc())
    with database.reading() as tx:
        text = tx.scalar(newest.limit(1))
    if text is None:
        return None
    body = json.loads(text)
    tasks = {
        name: {key: task[key] for key in ("metric", "num_samples", "before", "after", "after_stderr")}
        for suite in body["suites"]
        for name, task in suite["tasks"].items()
    }
    shown = {key: body.get(key) for key in ("server_round", "outcome", "height")}
    return {**shown, "tasks": tasks}


def last_evaluation_line(found: dict[str, Any]) -> str:
    """Return the newest evaluation as a line for the header of ``gym-server status``."""
    tasks = found["tasks"]
    before, after = (sum(task[side] for task in tasks.values()) / len(tasks) for side in ("before", "after"))
    return (
        f"evaluated in round {found['server_round']} ({found['outcome']}): mean of {counted(len(tasks), 'task')} "
        f"{before:.3f} -> {after:.3f}"
    )
