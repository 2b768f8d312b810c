"""Submit results to a leaderboard, and verify submissions by re-running random samples.

The verifier's signature over the line's hash selects the samples. Only the verifier's key can create it (RFC 8032,
deterministic), so a submitter cannot predict the samples, and anyone can verify the selection. A fraction f of
forged samples stays undetected by k draws with probability (1 - f)^k.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, file_sha256
from gym_fed.core.text import is_name, plain
from gym_fed.evaluation.leaderboard.board import MIN_SAMPLES, BoardRow, Leaderboard, records_folder
from gym_fed.evaluation.leaderboard.lines import (
    MAX_NAME,
    BoardFigure,
    BoardTask,
    Line,
    Reproduction,
    Submission,
    challenge_claim,
    corrupt,
)
from gym_fed.evaluation.records.document import paths_of, samples_path
from gym_fed.evaluation.records.reader import read_record
from gym_fed.evaluation.records.rerun import Rerun, compare_sample
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult
from gym_fed.trust.identity.keys import SigningKey, load_or_create
from gym_fed.trust.identity.passphrase import PassphraseSource
from gym_fed.version import __version__

_OF_THE_SET = {("ifeval", "inst_level_strict_acc"), ("ifeval", "inst_level_loose_acc")}
"""Tasks and metrics whose value is not a mean over the samples; all others, including chrF and mc2, are means."""


def submit(
    results: EvalResults,
    *,
    model_name: str,
    organization: str,
    board: str | Path = "leaderboard.jsonl",
    registry: str | Path | None = None,
    key: SigningKey | None = None,
) -> Line:
    """Append a line with these results, self-reported until a different key reproduces them.

    Args:
        board: The file, created if needed. The record is written next to it, for verifiers.
        registry: Folder or URL of the registry that has the board and receives the line and the record; ``board`` is
            the local copy.
        key: The signing key; None uses the key of ``$GYM_HOME`` or ``~/.gym-fed``.

    Raises:
        GymError: ``USAGE`` for names that are not visible text; ``DATA_INVALID`` for figures that do not match the
            samples; ``REPLAYED`` for results that the key already submitted; errors of ``Leaderboard``.
    """
    for field, name in (("model_name", model_name), ("organization", organization)):
        if not is_name(name, MAX_NAME):
            raise GymError(
                ErrorCode.USAGE, f"{field} {plain(name, 60)!r} must have 1 to {MAX_NAME} visible characters"
            )
    _require_own_figures(results)
    path = Path(board)
    # refuse a damaged board before anything is written
    opened = open_board(path, registry) if registry else Leaderboard.opened_to_add(path)
    # Other facts may contain local paths.
    facts = {key: results.facts[key] for key in ("suite", "options") if key in results.facts}
    named = replace(results, model=model_name, facts=facts)
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
    return opened.add(content, _home_key() if key is None else key)


def open_board(path: Path, registry: str | Path | None, head: str | None = None) -> Leaderboard:
    """Open a local board, or a registry's board with ``path`` as its local copy.

    Raises:
        GymError: Errors of ``Leaderboard`` and ``PublishedLeaderboard``.
    """
    if registry is None:
        return Leaderboard(path, head=head)
    from gym_fed.evaluation.leaderboard.published import PublishedLeaderboard

    return PublishedLeaderboard(path, registry, head=head)


def _home_key() -> SigningKey:
    """Load the key of ``$GYM_HOME`` or ``~/.gym-fed``, creating it on first use."""
    home = default_home()
    return load_or_create(home / "key.pem", PassphraseSource("GYM_PASSPHRASE").get)


def _require_own_figures(results: EvalResults) -> None:
    """Refuse figures that are not the mean of their samples.

    Metrics of a full set that have no value per sample, such as IFEval's share of all instructions, are exempt.

    Raises:
        GymError: ``DATA_INVALID`` naming the first such figure.
    """
    for task in results.tasks.values():
        for metric, figure in task.figures.items():
            values = [sample.metrics.get(metric) for sample in task.samples]
            if len(values) != figure.num_samples:
                raise _figure_error(
                    task, metric, f"the record states {figure.num_samples} samples, but has {len(values)}"
                )
            if (task.task, metric.partition(",")[0]) in _OF_THE_SET:
                continue
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                raise _figure_error(task, metric, f"{len(values) - len(known)} samples have no value")
            mean = math.fsum(known) / len(known) if known else math.nan
            if not math.isclose(mean, figure.value, rel_tol=1e-9, abs_tol=1e-9):
                raise _figure_error(
                    task, metric, f"the record states {figure.value}, but the samples give {mean}"
                )


def _figure_error(task: TaskResult, metric: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{plain(task.task, 60)}: {plain(metric, 60)}: {problem}",
        "the record was not written by a run: evaluate again with --fresh",
    )


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


SAME_RUN = ("model", "delta", "template")
"""Parts of an identity that must match; a reproduction may have a different engine, device or version."""


@dataclass(frozen=True)
class Reproduced:
    """The re-run samples and their outcome.

    Attributes:
        line: The line that was added.
        drawn: Indices of the drawn samples by task.
        differences: Differences by task and row; empty if the submission was reproduced.
        parted: The number of answers that diverged after a tie.
    """

    line: Line
    drawn: Mapping[str, tuple[int, ...]]
    differences: tuple[tuple[str, int, str], ...]
    parted: int


def verify(
    board: Leaderboard, row: BoardRow, rerun: Rerun, key: SigningKey, num_samples: int = 32
) -> Reproduced:
    """Re-run samples of a submission and add a signed line with the outcome.

    Args:
        rerun: See ``Rerun``; it uses the model, tasks and rows of this machine, and only row numbers from the record.
        num_samples: The number of samples; at least 16, or all if there are fewer.

    Raises:
        GymError: ``PERMISSION_DENIED`` for the key's own line; ``REPLAYED`` for a line that the key already verified;
            ``USAGE`` for too few samples; ``HASH_MISMATCH`` if the record next to the board is not the submitted one;
            ``BASE_MISMATCH`` if the model or the tasks on this machine differ; errors of ``rerun``.
    """
    submission = row.submission
    least, total = min(MIN_SAMPLES, submission.num_samples), submission.num_samples
    if num_samples < least:
        raise GymError(ErrorCode.USAGE, f"{num_samples} samples are too few", f"use at least {least}")
    row.require_another(key.public_key)  # fail early, before the samples are re-run
    board.fetch_record(row)
    recorded = record_of(board.path, row)
    challenge = key.sign(challenge_claim(row.line.entry.hash))
    places = drawn_samples(challenge, submission.tasks, min(num_samples, total))
    drawn = {
        task: tuple(recorded.tasks[task].samples[at].number for at in indices)
        for task, indices in places.items()
    }
    again = rerun(recorded, drawn)
    _require_same_run(recorded, again, drawn)
    differences, parted = _compared(recorded, again, drawn)
    content = Reproduction(
        line=row.line.entry.hash,
        challenge=challenge.hex(),
        num_samples=min(num_samples, total),
        outcome="differs" if differences else "reproduced",
        parted=parted,
        engine=f"gym-fed {__version__}",
        at=int(time.time()),
    )
    return Reproduced(board.add(content, key), drawn, tuple(differences), parted)


def drawn_samples(challenge: bytes, tasks: Sequence[BoardTask], count: int) -> dict[str, list[int]]:
    """Draw sample indices of the tasks from a challenge, without replacement.

    The n-th draw is ``sha256(challenge, n)`` modulo the number of samples; repeated ones are skipped.
    """
    total = sum(task.num_samples for task in tasks)
    chosen: dict[int, None] = {}
    turn = 0
    while len(chosen) < min(count, total):
        digest = hashlib.sha256(challenge + turn.to_bytes(8, "big")).digest()
        chosen.setdefault(int.from_bytes(digest, "big") % total)
        turn += 1
    places: defaultdict[str, list[int]] = defaultdict(list)
    for at in sorted(chosen):
        for task in tasks:
            if at < task.num_samples:
                places[task.task].append(at)
                break
            at -= task.num_samples
    return dict(places)


def record_of(board: Path, row: BoardRow) -> EvalResults:
    """Return the record next to the board if it is the submitted one and matches its line.

    Raises:
        GymError: ``FILE_NOT_FOUND``, ``DATA_INVALID``, ``HASH_MISMATCH``.
    """
    submission, folder = row.submission, records_folder(board)
    for path in paths_of(submission.record, folder):
        if not samples_path(path).is_file() or file_sha256(samples_path(path)) != submission.results:
            continue
        results = read_record(path)
        _require_own_figures(results)
        _require_line(row, results)
        return results
    raise GymError(
        ErrorCode.FILE_NOT_FOUND,
        f"line {row.line.entry.sequence}: its record {submission.record}, with samples of sha256 "
        f"{submission.results[:12]}, is not in {folder}",
        "fetch the board with its records",
    )


def _require_line(row: BoardRow, results: EvalResults) -> None:
    submission = row.submission
    figures = {
        task.task: (task.lock, len(task.samples), {m: float(f.value) for m, f in task.figures.items()})
        for task in results.tasks.values()
    }
    stated = {
        task.task: (task.lock, task.num_samples, {m: f.value for m, f in task.figures.items()})
        for task in submission.tasks
    }
    if dict(results.identity) != submission.identity or figures != stated:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"line {row.line.entry.sequence}: its record {submission.record} differs from the line",
            "do not trust this line",
        )


def _require_same_run(recorded: EvalResults, again: EvalResults, drawn: Mapping[str, Sequence[int]]) -> None:
    for part in SAME_RUN:
        ours, theirs = again.identity.get(part, ""), recorded.identity.get(part, "")
        if ours != theirs:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the {part} differs: {plain(ours, 70) or 'none'} here, {plain(theirs, 70) or 'none'} in the "
                "submission",
                "pass the submitted model with --model",
            )
    for name in drawn:
        if name not in again.tasks or again.tasks[name].lock != recorded.tasks[name].lock:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"task {plain(name, 60)}: its definition or rows on this machine differ from the submission's",
                "fetch the suite that was used: gym eval fetch",
            )


def _compared(
    recorded: EvalResults, again: EvalResults, drawn: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[str, int, str]], int]:
    differences, parted = [], 0
    for name, numbers in drawn.items():
        before, now = _by_number(recorded, name), _by_number(again, name)
        for number in numbers:
            if number not in now:
                raise corrupt(f"{plain(name, 60)}, sample {number} was not re-run")
            replayed = compare_sample(before[number], now[number])
            parted += replayed.parted is not None
            if replayed.difference is not None:
                differences.append((name, number, replayed.difference))
    return differences, parted


def _by_number(results: EvalResults, task: str) -> dict[int, SampleResult]:
    return {sample.number: sample for sample in results.tasks[task].samples}
