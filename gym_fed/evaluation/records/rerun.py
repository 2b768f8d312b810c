"""Evaluates single rows of a record again: task, rows and model are of this machine, only numbers of the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.core.text import plain
from gym_fed.evaluation.results import EvalResults, TaskResult

Rerun = Callable[[EvalResults, Mapping[str, Sequence[int]]], EvalResults]
"""Evaluates rows again, by task and number, as the given results say that it was done."""


def rerun_on(model: Any, data: str | Path | None = None, own: Sequence[str] = ()) -> Rerun:
    """What re-runs rows of a record on a model of this machine.

    Args:
        model: As ``Evaluator`` takes it.
        data: Folder of evaluation sets.
        own: Files that the tasks may be in, as the user names them: a record, which may be another's, must
            not name files of this machine.

    Returns:
        See ``Rerun``. It raises ``USAGE`` for a task or row that is not here, and as ``open_models`` and ``tasks_of``.
    """

    def rerun(recorded: EvalResults, wanted: Mapping[str, Sequence[int]]) -> EvalResults:
        from gym_fed.evaluation.scoring.opening import ModelRequest, open_models, template_digest

        request = ModelRequest(model, dtype=recorded.identity.get("dtype", "float32"))
        with open_models(request) as models:
            name = models.scorer.models[0]
            tasks = {
                task: _rerun_task(models.scorer, recorded.tasks[task], numbers, data, own)
                for task, numbers in wanted.items()
            }
            with_template = any(task.chat_template for task in recorded.tasks.values())
            identity = {
                **models.identities[name],
                "template": template_digest(models.scorer.tokenizer, with_template),
            }
            return EvalResults(models.names[name], identity, tasks, 0.0)

    return rerun


def _rerun_task(
    scorer: Any,
    recorded: TaskResult,
    numbers: Sequence[int],
    data: str | Path | None,
    own: Sequence[str],
) -> TaskResult:
    """One task with these rows alone; prompts are made of all rows before them, too, as examples are drawn in turn."""
    from gym_fed.evaluation.evaluator import computed
    from gym_fed.evaluation.harness.preparation import Preparation
    from gym_fed.evaluation.harness.requests import PromptOptions

    limit = max(len(recorded.samples), max(numbers) + 1)  # a generated task is another one with another limit
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
    found = preparation.results(outcomes)[recorded.task]
    missing = set(numbers) - {sample.number for sample in found.samples}
    if missing:
        raise GymError(
            ErrorCode.USAGE, f"{plain(recorded.task, 60)} has no row {min(missing)} on this machine"
        )
    return found


def _source(
    task: str, limit: int, tokenizer: Any, data: Path | None, own: Sequence[str], shots: int | None = None
) -> Any:
    """The task, by its name alone or in one of these files."""
    from gym_fed.evaluation.own_rows import is_own, own_rows
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
        raise GymError(ErrorCode.USAGE, f"{plain(task, 60)} is a file, and no task of gym-fed")
    try:
        return tasks_of([task], data, limit, num_fewshot=shots)[0]
    except GymError as error:
        if error.code is ErrorCode.USAGE and not own:
            raise GymError(
                error.code, error.message, f"if it is in a file: give --task-file FILE; {error.hint}"
            ) from error
        raise
