"""Evaluate a hub's loaded model on tasks of its config, on all rows or on rows drawn by a seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.hub.sections import GateConfig, GateEvaluation
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.evaluation.results import TaskResult

if TYPE_CHECKING:
    from gym_fed.evaluation.harness.preparation import Preparation
    from gym_fed.evaluation.scoring.scorer import Scorer
    from gym_fed.evaluation.suites.eval_task import EvalTask


Draw = Callable[[str, int], Sequence[int]]
"""A function from a task's name and its number of rows to the row numbers to use."""


@dataclass(frozen=True)
class SuiteTasks:
    """A suite from the config with its tasks, whose rows are available locally.

    Attributes:
        config: The suite's entry in ``gate.evals``.
        tasks: Tasks, in the suite's order.
    """

    config: GateEvaluation
    tasks: Sequence[EvalTask]


def suites_of(gate: GateConfig, folder: Path) -> list[SuiteTasks]:
    """Return the suites that a config names.

    Args:
        gate: The gate's config.
        folder: Folder against which relative paths are resolved.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` without lm-eval; ``UNAVAILABLE`` if a dataset's rows are not on this machine,
            with the command that fetches it; ``CONFIG_INVALID`` for an unknown name.
    """
    return [SuiteTasks(one, tasks_named(one.suite, gate, folder)) for one in gate.evals]


def announced_suites(gate: GateConfig, folder: Path) -> dict[str, str]:
    """Return the digests of tasks and rows by suite, as a round's task announces them.

    A task file is named without its folder. Raises the errors of ``suites_of``.
    """
    return {
        re.sub(r"[^A-Za-z0-9_.-]|^[.-]", "_", Path(one.config.suite).name)[:120]: suite_digest(one.tasks)
        for one in suites_of(gate, folder)
    }


def suite_digest(tasks: Sequence[EvalTask]) -> str:
    """Return the digest of the definitions and rows of a suite's tasks."""
    return canonical_digest({task.name: task.lock for task in tasks})


def tasks_named(suite: str, gate: GateConfig, folder: Path) -> list[EvalTask]:
    """Return the tasks of one suite. Raises the errors of ``suites_of``."""
    from gym_fed.evaluation.harness.preparation import require_harness
    from gym_fed.evaluation.suites.tasks import tasks_of

    require_harness()
    name = str(folder / suite) if suite.endswith((".yaml", ".yml")) else suite
    data = None if gate.evals_data is None else folder / gate.evals_data
    try:
        return tasks_of([name], data)
    except GymError as error:
        if error.code is not ErrorCode.UNAVAILABLE:
            raise
        remedy = f"fetch them with gym eval fetch {suite}, or set gate.evals_data to a folder that has them"
        raise GymError(error.code, error.message, remedy) from error


def prepare(suite: SuiteTasks, model: Any, tokenizer: Any, draw: Draw) -> Preparation:
    """Prepare a suite's requests for a model, on the drawn rows. Raises the errors of ``Preparation``."""
    from gym_fed.evaluation.harness.preparation import Preparation
    from gym_fed.evaluation.harness.sources import PromptOptions

    longest = int(model.config.get_text_config().max_position_embeddings)
    options = PromptOptions(apply_chat_template=suite.config.apply_chat_template, rows=draw)
    return Preparation(suite.tasks, tokenizer, longest, options)


def measure(model: Any, tokenizer: Any, preparation: Preparation) -> dict[str, TaskResult]:
    """Evaluate a model with its current weights, without changing it; return the results by task.

    Raises:
        GymError: ``MODEL_INVALID`` if the serving engine cannot run the model.
    """
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    with MultiVariantModel(model) as served:
        return _results(LocalScorer(served, tokenizer, {_ONLY: None}), preparation)


def check_measurable(suite: SuiteTasks, model: Any, tokenizer: Any) -> None:
    """Evaluate a suite's first row to check that it can run. Raises the errors of ``prepare`` and ``measure``."""
    measure(model, tokenizer, prepare(suite, model, tokenizer, lambda task, total: [0]))


_ONLY = "base"


def _results(scorer: Scorer, preparation: Preparation) -> dict[str, TaskResult]:
    from gym_fed.evaluation.harness.preparation import computed

    found = computed(scorer, preparation.requests)
    return preparation.results({request.key: by_model[_ONLY] for request, by_model in found})


def main_value(task: TaskResult) -> float:
    """Return the task's main figure, for gates and tables; higher is better for every metric."""
    figure = task.figures[task.main_metric]
    return float(figure.value if figure.higher_is_better else -figure.value)


def mean_value(results: Mapping[str, TaskResult]) -> float:
    """Return the mean of the tasks' main figures."""
    return sum(main_value(task) for task in results.values()) / len(results)
