"""Re-run single rows of a record with the tasks and model of this machine, and compare the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.core.text import plain
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult

LOGPROB_TOLERANCE = 1e-3
"""Tolerance in nats for log-likelihoods on different machines."""
TIE_NATS = 1e-2
"""Tolerance in nats for ties: answers may diverge at a token whose lead over the second-best is smaller."""
_METRIC_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Replayed:
    """The comparison of a sample with its re-run.

    Attributes:
        difference: Description of a difference beyond rounding; None if there is none.
        parted: Index of the token at which the answers diverged after a tie; None if they did not.
        logprob_error: Largest difference of a log-likelihood, in nats; 0 for an answer.
    """

    difference: str | None
    parted: int | None = None
    logprob_error: float = 0.0


def compare_sample(before: SampleResult, again: SampleResult) -> Replayed:
    """Compare a sample with its re-run.

    Log-likelihoods may differ by 1e-3 nats, and the most likely choice must be the same unless the two most likely ones
    are that close. Answers must have the same tokens up to a tie of less than 1e-2 nats. Both runs must report the tie,
    since margins in a record can be forged, while those of the re-run cannot.

    Args:
        before: The recorded sample.
        again: The same sample on this machine.
    """
    if before.row_sha256 != again.row_sha256:
        return Replayed("is a different row")
    if before.prompt != again.prompt:
        return Replayed("has a different prompt")
    if before.choices != again.choices or before.target != again.target:
        return Replayed("has different choices or a different target")
    if before.answer is not None or again.answer is not None:
        return _compare_answers(before, again)
    if len(before.logprobs) != len(again.logprobs):
        return Replayed(f"{len(again.logprobs)} log-likelihoods instead of {len(before.logprobs)}")
    error = max((_distance(a, b) for a, b in zip(before.logprobs, again.logprobs, strict=True)), default=0.0)
    if not error <= LOGPROB_TOLERANCE:
        return Replayed(f"a log-likelihood differs by {error:.3g} nats", logprob_error=error)
    chosen, other = _likeliest(before), _likeliest(again)
    if chosen != other and _distance(before.logprobs[chosen], before.logprobs[other]) > LOGPROB_TOLERANCE:
        return Replayed(f"choice {other} is the most likely instead of {chosen}", logprob_error=error)
    return Replayed(_other_metrics(before, again) if chosen == other else None, logprob_error=error)


def _compare_answers(before: SampleResult, again: SampleResult) -> Replayed:
    if before.answer is None or again.answer is None:
        return Replayed("one is an answer, the other a choice")
    pairs = zip(before.token_ids, again.token_ids, strict=False)
    shared = min(len(before.token_ids), len(again.token_ids))
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), shared)
    if at == len(before.token_ids) == len(again.token_ids):
        if before.answer != again.answer:
            return Replayed("the same tokens have a different text")
        return Replayed(_other_metrics(before, again))
    if all(at < len(sample.margins) and 0 <= sample.margins[at] < TIE_NATS for sample in (before, again)):
        return Replayed(None, parted=at)
    return Replayed(f"the answer differs from token {at} on, and there was no tie")


def _other_metrics(before: SampleResult, again: SampleResult) -> str | None:
    if before.metrics.keys() != again.metrics.keys():
        return "has different metrics"
    for name, value in before.metrics.items():
        if not _distance(value, again.metrics[name]) <= _METRIC_TOLERANCE * max(1.0, abs(value)):
            return f"{name} is {again.metrics[name]:g} instead of {value:g}"
    return None


def _likeliest(sample: SampleResult) -> int:
    return max(range(len(sample.logprobs)), key=sample.logprobs.__getitem__, default=0)


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf


Rerun = Callable[[EvalResults, Mapping[str, Sequence[int]]], EvalResults]
"""Evaluates rows by task and number, with the options of the given results."""


def rerun_on(model: Any, data: str | Path | None = None, own: Sequence[str] = ()) -> Rerun:
    """Return a function that re-runs rows of a record on a local model.

    Args:
        model: A model, as for ``Evaluator``.
        data: Folder of evaluation sets.
        own: Task files that the user names; a record may be untrusted, so it must not name files of this machine.

    Returns:
        See ``Rerun``. It raises ``USAGE`` for a task or row that is not on this machine, and as ``open_models`` and
        ``tasks_of``.
    """

    def rerun(recorded: EvalResults, row_numbers: Mapping[str, Sequence[int]]) -> EvalResults:
        from gym_fed.evaluation.scoring.models import (
            ModelRequest,
            open_models,
            resolve_model,
            template_digest,
        )

        request = ModelRequest(model, dtype=recorded.identity.get("dtype", "float32"))
        with open_models(resolve_model(request)) as models:
            name = models.scorer.models[0]
            tasks = {
                task: _rerun_task(models.scorer, recorded.tasks[task], numbers, data, own)
                for task, numbers in row_numbers.items()
            }
            with_template = any(task.chat_template for task in recorded.tasks.values())
            identity = {
                **models.identities[name],
                "template": template_digest(models.scorer.tokenizer, with_template),
            }
            return EvalResults(models.names[name], identity, tasks, 0.0)

    return rerun


def _rerun_task(
    scorer: Any, recorded: TaskResult, numbers: Sequence[int], data: str | Path | None, own: Sequence[str]
) -> TaskResult:
    """Re-run rows of one task, with the prompts of all earlier rows, since examples are drawn in order."""
    from gym_fed.evaluation.harness.preparation import Preparation, computed
    from gym_fed.evaluation.harness.sources import PromptOptions

    limit = max(len(recorded.samples), max(numbers) + 1)  # a generated task depends on the limit
    where = None if data is None else Path(data)
    source = _source(recorded.task, limit, scorer.tokenizer, where, own)
    if recorded.num_fewshot != int(source.config.get("num_fewshot") or 0):
        source = _source(recorded.task, limit, scorer.tokenizer, where, own, recorded.num_fewshot)
    options = PromptOptions(
        recorded.num_fewshot, limit, recorded.chat_template, rows=lambda task, total: numbers
    )
    preparation = Preparation([source], scorer.tokenizer, scorer.max_length, options)
    name = scorer.models[0]
    outcomes = {request.key: by_model[name] for request, by_model in computed(scorer, preparation.requests)}
    result = preparation.results(outcomes)[recorded.task]
    missing = set(numbers) - {sample.number for sample in result.samples}
    if missing:
        raise GymError(
            ErrorCode.USAGE, f"{plain(recorded.task, 60)} has no row {min(missing)} on this machine"
        )
    return result


def _source(
    task: str, limit: int, tokenizer: Any, data: Path | None, own: Sequence[str], shots: int | None = None
) -> Any:
    """Return the task by name, or from one of the own files."""
    from gym_fed.evaluation.harness.sources import is_own, own_rows
    from gym_fed.evaluation.suites.tasks import tasks_of

    for benchmark in own:
        if is_own(benchmark):
            if (source := own_rows(benchmark, tokenizer, limit)).name == task:
                return source
        elif benchmark.endswith((".yaml", ".yml")):
            for spec in tasks_of([benchmark], data, limit, num_fewshot=shots):
                if spec.name == task:
                    return spec
    if task in TASKS:
        return own_rows(task, tokenizer, limit)
    if "/" in task or task.endswith((".yaml", ".yml")):
        raise GymError(ErrorCode.USAGE, f"{plain(task, 60)} is a task file, not a built-in task")
    try:
        return tasks_of([task], data, limit, num_fewshot=shots)[0]
    except GymError as error:
        if error.code is ErrorCode.USAGE and not own:
            raise GymError(
                error.code, error.message, f"if it is in a file, pass --task-file FILE; {error.hint}"
            ) from error
        raise
