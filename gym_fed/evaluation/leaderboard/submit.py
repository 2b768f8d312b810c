"""Submit the results of a run to a leaderboard: the record and a signed line with its digests."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, file_sha256
from gym_fed.core.text import is_name, plain
from gym_fed.evaluation.leaderboard.board import Leaderboard
from gym_fed.evaluation.leaderboard.lines import MAX_NAME, BoardFigure, BoardTask, Line, Submission
from gym_fed.evaluation.records.keys import samples_path
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, TaskResult
from gym_fed.trust.identity.keys import SigningKey, load_or_create
from gym_fed.trust.identity.passphrase import PassphraseSource

_OF_THE_SET = {("ifeval", "inst_level_strict_acc"), ("ifeval", "inst_level_loose_acc")}
"""Tasks and metrics whose value is not a mean over the samples; those of all others are, including chrF and mc2."""


def records_folder(board: Path) -> Path:
    """Return the folder of a board's records, next to the board."""
    return board.with_name(f"{board.stem}.records")


def submit(
    results: EvalResults,
    *,
    model_name: str,
    organization: str,
    board: str | Path = "leaderboard.jsonl",
    key: SigningKey | None = None,
) -> Line:
    """Append a line with these results, self-reported until another key reproduces them.

    Args:
        results: The results of the run.
        model_name: The model's name on the board.
        organization: Who submits it.
        board: The file, created if needed. The record is written next to it, for verifiers.
        key: Who signs; None takes the key of this home (``$GYM_HOME`` or ``~/.gym-fed``).

    Raises:
        GymError: ``USAGE`` for names that are not visible text; ``DATA_INVALID`` for figures that are not the samples';
            ``REPLAYED`` for results that the key has submitted; as ``Leaderboard``.
    """
    for field, name in (("model_name", model_name), ("organization", organization)):
        if not is_name(name, MAX_NAME):
            raise GymError(
                ErrorCode.USAGE, f"{field} {plain(name, 60)!r} is not 1 to {MAX_NAME} visible characters"
            )
    require_own_figures(results)
    path = Path(board)
    opened = Leaderboard.opened_to_add(path)  # refuse a damaged board before anything is written
    named = replace(results, model=model_name, facts=_public(results))
    written = write_record(named, records_folder(path), organization=organization)
    content = Submission(
        model_name=model_name,
        organization=organization,
        record=written.stem,
        identity=dict(results.identity),
        results=file_sha256(samples_path(written)),
        tasks=[_task(task) for task in results.tasks.values()],
        at=int(time.time()),
    )
    return opened.add(content, home_key() if key is None else key)


def home_key() -> SigningKey:
    """Load the key of ``$GYM_HOME`` or ``~/.gym-fed``, creating it on first use."""
    home = default_home()
    return load_or_create(home / "key.pem", PassphraseSource("GYM_PASSPHRASE").get)


def require_own_figures(results: EvalResults) -> None:
    """Refuse figures that are not the mean of their samples.

    Figures of a whole set without a value per sample are exempt, such as IFEval's share of all instructions.

    Raises:
        GymError: ``DATA_INVALID`` naming the first one.
    """
    for task in results.tasks.values():
        for metric, figure in task.figures.items():
            values = [sample.metrics.get(metric) for sample in task.samples]
            if len(values) != figure.num_samples:
                raise _not_own(
                    task, metric, f"{figure.num_samples} samples are stated, {len(values)} are there"
                )
            if (task.task, metric.partition(",")[0]) in _OF_THE_SET:
                continue
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                raise _not_own(task, metric, f"{len(values) - len(known)} samples have no value")
            mean = math.fsum(known) / len(known) if known else math.nan
            if not math.isclose(mean, figure.value, rel_tol=1e-9, abs_tol=1e-9):
                raise _not_own(task, metric, f"{figure.value} is stated, the samples have {mean}")


def _not_own(task: TaskResult, metric: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{plain(task.task, 60)}: {plain(metric, 60)}: {problem}",
        "the record is not that of a run: evaluate again with --fresh",
    )


def _public(results: EvalResults) -> dict[str, object]:
    """Remove local paths from the facts that are published."""
    return {key: results.facts[key] for key in ("suite", "options") if key in results.facts}


def _task(task: TaskResult) -> BoardTask:
    return BoardTask(
        task=task.task,
        version=task.version,
        num_fewshot=task.num_fewshot,
        lock=task.lock,
        num_samples=len(task.samples),
        main_metric=task.main_metric,
        figures={
            metric: BoardFigure(
                value=float(figure.value),
                stderr=None if figure.stderr is None else float(figure.stderr),
                higher_is_better=figure.higher_is_better,
            )
            for metric, figure in task.figures.items()
        },
    )
