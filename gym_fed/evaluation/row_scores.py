"""Score models on the user's rows by loss, exact match of short answers and graders, and compare two models.

Rows are scored in the same way for a model, its base, and any other model that it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.row_counts import RowCounts, teaches
from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.generation import context_of, greedy_ids
from gym_fed.evaluation.graders.base import Grader, build_graders
from gym_fed.evaluation.grading import grade_answers
from gym_fed.evaluation.loss import BATCH_TOKENS, row_losses
from gym_fed.evaluation.own_set import DEFAULT_LENGTH, MAX_TOKENS, OwnRow, Rendering, render
from gym_fed.evaluation.results import standard_error
from gym_fed.serving.reasoning.answers import AnswerReader, ReadAnswer

LOSS, EXACT_MATCH = "loss", "exact_match"
_LOSS_ROWS, _ANSWERS = 64, 16
_MIN_ANSWER, _MAX_ANSWER = 64, 512

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RowScores:
    """A model's scores by row; None where a row has no such score.

    Attributes:
        metrics: ``loss`` in nats per token, ``exact_match`` of short answers, and each grader's values, by name.
        ended: For each answer, True if the model ended it within ``max_tokens``.
        counts: Counts of used, cut and dropped rows.
        max_length: Maximum number of tokens per row.
        too_long: Number of rows whose prompt leaves no room for an answer.
        thoughts: The thoughts before the answers.
        unfinished: The number of answers that ended inside a thought; they count as empty.
    """

    metrics: dict[str, list[float | None]]
    answers: list[str | None]
    ended: list[bool | None]
    counts: RowCounts
    max_length: int
    max_tokens: int
    too_long: int
    thoughts: list[str | None]
    unfinished: int


@dataclass(frozen=True)
class RowMetric:
    """A metric of a model and, in a comparison, of the other model on the same rows.

    Attributes:
        name: ``loss``, ``exact_match`` or a grader's name.
        num_rows: Number of rows with a value; if two models are compared, with a value from both.
        value: Mean over the rows.
        stderr: The standard error; None for a single row.
        before: The other model's mean; None if there is no other model.
        before_stderr: The standard error of ``before``.
        change: ``value - before``.
        change_stderr: The standard error of the change, paired by row.
    """

    name: str
    num_rows: int
    value: float
    stderr: float | None
    before: float | None = None
    before_stderr: float | None = None
    change: float | None = None
    change_stderr: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary without infinite or NaN values."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def check_references(rows: Sequence[OwnRow], graders: Sequence[GraderConfig]) -> None:
    """Grade the reference answers with rule-based graders, so that unreadable references are found early.

    Raises:
        GymError: Errors from the graders, with the row's position.
    """
    built = [grader for grader in build_graders(graders) if type(grader).setup is Grader.setup]
    for row in rows if built else ():
        if row.reference is None:
            continue
        try:
            grade_answers([{**row.graded, "completion": row.reference}], built)
        except GymError as error:
            raise GymError(error.code, f"{row.place}: {error.message}", error.hint) from error


def longest_row(model: Any, rendering: Rendering) -> int:
    """Return the maximum row length in tokens: the run's or the default, capped at the model's context length."""
    return min(rendering.max_length or DEFAULT_LENGTH, _context(model))


def score_rows(
    model: Any,
    tokenizer: Any,
    rows: Sequence[OwnRow],
    rendering: Rendering,
    *,
    max_length: int,
    graders: Sequence[GraderConfig] = (),
    max_tokens: int | None = None,
    on_progress: OnProgress = lambda done, total, what: None,
) -> RowScores:
    """Score a model on rows by loss, exact match and graders.

    Args:
        model: A causal LM.
        tokenizer: The tokenizer that rows are rendered with.
        rows: Rows from ``read_own_rows``.
        rendering: The run's rendering options.
        max_length: Maximum number of tokens per row.
        max_tokens: Maximum number of tokens per answer. None for twice the longest reference, or 512 for a reasoning
            model.
        on_progress: Called with the rows done, their total, and the name of the step.

    Raises:
        GymError: Errors from ``render`` and the graders.
    """
    encoded, prompts = render(tokenizer, rows, rendering, max_length)
    losses: list[float | None] = [None] * len(rows)
    scored = [i for i, own_row in enumerate(rows) if own_row.has_answer]
    by_length = sorted(scored, key=lambda i: len(encoded[i]["input_ids"]))
    for start in range(0, len(by_length), _LOSS_ROWS):
        on_progress(start, len(by_length), LOSS)
        at = by_length[start : start + _LOSS_ROWS]
        longest = max(len(encoded[i]["input_ids"]) for i in at)
        size = max(1, min(_LOSS_ROWS, BATCH_TOKENS // max(1, longest)))
        part_losses = row_losses(
            model, tokenizer, [encoded[i] for i in at], max_length=max_length, batch_size=size
        )
        for i, loss in zip(at, part_losses, strict=True):
            losses[i] = None if math.isnan(loss) and not teaches(encoded[i]["labels"]) else loss
    short = {
        i
        for i, own_row in enumerate(rows)
        if own_row.is_short and prompts[i] and _num_tokens(tokenizer, own_row.reference) <= MAX_TOKENS
    }
    to_answer = [i for i, ids in enumerate(prompts) if ids and (graders or i in short)]
    reader = AnswerReader(tokenizer)
    room = max_tokens or (_MAX_ANSWER if reader.thinks else _room(tokenizer, [rows[i] for i in to_answer]))
    read, ended = _answers(model, tokenizer, reader, prompts, to_answer, room, on_progress)
    answers = [None if answer is None else answer.text for answer in read]
    exact: list[float | None] = [
        float(answer.strip() == row.reference) if i in short and answer is not None else None
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]
    metrics = {LOSS: losses, EXACT_MATCH: exact, **_grades(rows, answers, graders)}
    too_long = sum(answers[i] is None for i in to_answer)
    return RowScores(
        metrics,
        answers,
        ended,
        encoded.counts,
        max_length,
        room,
        too_long,
        thoughts=[None if answer is None else answer.thought for answer in read],
        unfinished=sum(answer is not None and answer.is_unfinished for answer in read),
    )


def row_metrics(
    after: RowScores, before: RowScores | None = None, *, leave_out: Sequence[str] = ()
) -> list[RowMetric]:
    """Compute means, standard errors and paired differences from ``before``; metrics without values are omitted."""
    metrics = []
    for name, values in after.metrics.items():
        others = None if before is None or name in leave_out else before.metrics[name]
        pairs = [
            (value, other)
            for value, other in zip(values, others or values, strict=True)
            if value is not None and other is not None
        ]
        if not pairs:
            continue
        own_values = [value for value, _ in pairs]
        if others is None:
            metrics.append(RowMetric(name, len(own_values), _mean(own_values), standard_error(own_values)))
            continue
        other_values = [other for _, other in pairs]
        metrics.append(paired_metric(name, own_values, other_values))
    return metrics


def paired_metric(name: str, after: Sequence[float], before: Sequence[float]) -> RowMetric:
    """Compare two models' values on the same rows, in the same order."""
    change = paired_difference(after, before)
    return RowMetric(
        name,
        len(after),
        _mean(after),
        standard_error(after),
        _mean(before),
        standard_error(before),
        change.difference,
        change.stderr,
    )


def _answers(
    model: Any,
    tokenizer: Any,
    reader: AnswerReader,
    prompts: Sequence[list[int]],
    indices: Sequence[int],
    max_tokens: int,
    on_progress: OnProgress,
) -> tuple[list[ReadAnswer | None], list[bool | None]]:
    """Generate greedy answers to the prompts at ``indices``; None if the prompt leaves no room for one."""
    answers: list[ReadAnswer | None] = [None] * len(prompts)
    ended: list[bool | None] = [None] * len(prompts)
    fitting = [i for i in indices if len(prompts[i]) < _context(model)]
    fitting.sort(key=lambda i: len(prompts[i]))
    for start in range(0, len(fitting), _ANSWERS):
        on_progress(start, len(fitting), "answers")
        at = fitting[start : start + _ANSWERS]
        room = min(max_tokens, _context(model) - max(len(prompts[i]) for i in at))
        generated = greedy_ids(model, tokenizer, [prompts[i] for i in at], max_new_tokens=room)
        for i, answer in zip(at, generated, strict=True):
            answers[i] = reader.read(prompts[i], answer.ids)
            ended[i] = answer.ended
    return answers, ended


def _grades(
    rows: Sequence[OwnRow], answers: Sequence[str | None], graders: Sequence[GraderConfig]
) -> dict[str, list[float | None]]:
    if not graders:
        return {}
    at = [i for i, answer in enumerate(answers) if answer is not None]
    if not at:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "no prompt leaves the model room for an answer",
            "shorten the prompts, or use a model with a longer context",
        )
    grades = grade_answers([{**rows[i].graded, "completion": answers[i]} for i in at], build_graders(graders))
    grades_by_name: dict[str, list[float | None]] = {}
    for name, values in grades.values.items():
        column: list[float | None] = [None] * len(rows)
        for i, value in zip(at, values, strict=True):
            column[i] = value
        grades_by_name[name] = column
    return grades_by_name


def _room(tokenizer: Any, rows: Sequence[OwnRow]) -> int:
    """Return twice the longest reference's length, within bounds, so that most longer answers can still finish."""
    own = max((_num_tokens(tokenizer, row.reference) for row in rows), default=0)
    return _MAX_ANSWER if not own else min(_MAX_ANSWER, max(_MIN_ANSWER, 2 * own))


def _num_tokens(tokenizer: Any, text: str | None) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0


def _context(model: Any) -> int:
    return context_of(model) or 1 << 30


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
