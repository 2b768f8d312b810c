"""Results of an evaluation: metrics with standard errors, samples, and pooled task groups (MMLU's 57 subjects)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.text import counted


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class Figure:
    """A metric of a task.

    Attributes:
        value: Mean over the samples, as the metric defines it.
        stderr: Standard error of ``value``; None if there is none.
        num_samples: Number of samples.
        higher_is_better: True if a higher value is better.
    """

    value: float
    stderr: float | None
    num_samples: int
    higher_is_better: bool = True


@dataclass(frozen=True)
class SampleResult:
    """One model's result on a row of a task: input, output and score.

    Attributes:
        number: Index of the row in its task's split, from 0.
        row_sha256: Digest of the row, so that two runs can be paired by it.
        prompt: The model's input, possibly truncated; never empty.
        choices: Continuations that were scored; empty for a generation.
        logprobs: Log-probabilities of ``choices`` in nats.
        answer: The generated text; None for scored choices.
        token_ids: Tokens of ``answer``.
        target: The correct answer.
        metrics: The sample's values by metric.
        cut: Number of prompt tokens that did not fit in the context.
        margins: See ``scoring.scorer.AnswerResult``, as for ``thought`` and ``is_unfinished``.
    """

    number: int
    row_sha256: str
    prompt: str
    choices: tuple[str, ...]
    logprobs: tuple[float, ...]
    answer: str | None
    token_ids: tuple[int, ...]
    target: str
    metrics: Mapping[str, float]
    cut: int = 0
    margins: tuple[float, ...] = ()
    thought: str = ""
    is_unfinished: bool = False


@dataclass(frozen=True)
class TaskResult:
    """One model's result on one task.

    Attributes:
        task: Name of the task.
        version: The version of the task's definition.
        num_fewshot: Number of examples in each prompt.
        figures: Figures by metric.
        samples: All samples, ordered by ``number``.
        lock: Digests of the task definition and the data, which must match to reproduce the result.
        chat_template: True if the prompts were put into the model's chat template.
    """

    task: str
    version: str
    num_fewshot: int
    figures: Mapping[str, Figure]
    samples: tuple[SampleResult, ...]
    lock: str
    chat_template: bool = False

    @property
    def num_unfinished(self) -> int:
        """The number of answers that ended inside a thought; they are scored as empty."""
        return sum(sample.is_unfinished for sample in self.samples)

    @property
    def main_metric(self) -> str:
        """The metric for tables and gates: ``acc_norm``, else ``acc``, else ``exact_match``, else the first one."""
        return next(
            (name for name in ("acc_norm", "acc", "exact_match") if name in self.figures),
            next(iter(self.figures)),
        )


@dataclass(frozen=True)
class EvalResults:
    """The results of one model on some tasks.

    Attributes:
        model: The model as named by the user.
        identity: The key of the results: digests of the model, settings, delta, template and suite; decoding,
            dtype, engine and harness.
        tasks: Results by task.
        seconds: Duration of the run; with several models in one pass, of the pass.
        facts: Facts about the machine and the libraries, which are stored in the evaluation record.
    """

    model: str
    identity: Mapping[str, str]
    tasks: Mapping[str, TaskResult]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, task: str) -> dict[str, float]:
        """Return the values of a task by metric, and ``num_examples``."""
        result = self.tasks[task]
        values = {name: figure.value for name, figure in result.figures.items()}
        return {**values, "num_examples": len(result.samples)}

    def save(self, path: str | Path) -> Path:
        """Write the values of all tasks as JSON."""
        target = Path(path)
        document = {task: self[task] for task in self.tasks}
        write_atomically(target, f"{json.dumps(document, indent=2, sort_keys=True)}\n".encode())
        return target


def with_groups(results: EvalResults, group_of: Mapping[str, str]) -> EvalResults:
    """Return results with a pooled entry before each group of several tasks.

    A group's value is the mean over all rows of its tasks, so larger tasks have more weight, as for MMLU in
    lm-evaluation-harness; the standard error is that of this mean.
    """
    members: dict[str, list[TaskResult]] = {}
    for name, task in results.tasks.items():
        members.setdefault(group_of.get(name, name), []).append(task)
    with_pooled: dict[str, TaskResult] = {}
    for group, tasks in members.items():
        if len(tasks) > 1 and _can_be_pooled(tasks):
            pooled = _pooled(f"{group} ({counted(len(tasks), 'task')})", tasks)
            with_pooled[pooled.task] = pooled
        with_pooled |= {task.task: task for task in tasks}
    return replace(results, tasks=with_pooled)


def groups_of(names: Iterable[str]) -> dict[str, str]:
    """Return the group of each task, for groups of several tasks."""
    from gym_fed.evaluation.suites.definitions import members
    from gym_fed.evaluation.suites.store import listing

    chosen, groups = set(names), {}
    for entry_name, entry in listing().tasks.items():
        # Read the harness's definitions of a group only if a name has the group's prefix.
        beginning = (entry.dataset if entry.each == "task" else entry_name.partition("_")[0]) or entry_name
        if not entry.tasks and any(name.startswith(beginning) for name in chosen):
            try:
                of_group = members(entry_name)
            except GymError as error:
                if error.code is not ErrorCode.MISSING_DEPENDENCY:
                    raise
                continue  # the harness's groups are unknown if it is not installed
            groups.update({name: entry_name for name in of_group if name in chosen and len(of_group) > 1})
    return groups


@dataclass(frozen=True)
class BriefFigure:
    """A metric of a task without its samples."""

    task: str
    metric: str
    value: float
    num_samples: int


def brief_figures(figures: Sequence[BriefFigure]) -> list[BriefFigure]:
    """Pool the figures of each group and metric into the mean over all rows."""
    group_of = groups_of(figure.task for figure in figures)
    members: dict[tuple[str, str], list[BriefFigure]] = {}
    for figure in figures:
        members.setdefault((group_of.get(figure.task, figure.task), figure.metric), []).append(figure)
    pooled_figures = []
    for (group, metric), group_figures in members.items():
        if len(group_figures) == 1:
            pooled_figures += group_figures
            continue
        rows = sum(figure.num_samples for figure in group_figures)
        mean = sum(figure.value * figure.num_samples for figure in group_figures) / max(rows, 1)
        name = f"{group} ({counted(len(group_figures), 'task')})"
        pooled_figures.append(BriefFigure(name, metric, mean, rows))
    return pooled_figures


def listed(texts: Sequence[str], room: int) -> str:
    """Join as many texts as fit, with commas, and append how many were omitted."""
    first_texts = list(texts[: room // 2])
    while True:
        more = f", and {len(texts) - len(first_texts)} more" if len(first_texts) < len(texts) else ""
        shown = ", ".join(first_texts) + more
        if len(shown) <= room or len(first_texts) <= 1:
            return shown
        first_texts.pop()


def _can_be_pooled(tasks: Sequence[TaskResult]) -> bool:
    """Return True if the tasks share their metric and have all samples, which a record from another source may lack."""
    metric = tasks[0].main_metric
    return all(
        task.main_metric == metric
        and task.samples
        and all(metric in sample.metrics for sample in task.samples)
        for task in tasks
    )


def _pooled(name: str, tasks: Sequence[TaskResult]) -> TaskResult:
    metric = tasks[0].main_metric
    samples = tuple(sample for task in tasks for sample in task.samples)
    values = np.asarray([sample.metrics[metric] for sample in samples], dtype=np.float64)
    higher_is_better = tasks[0].figures[metric].higher_is_better
    figure = Figure(float(values.mean()), standard_error(values), len(values), higher_is_better)
    return replace(
        tasks[0],
        task=name,
        figures={metric: figure},
        samples=samples,
        lock=",".join(task.lock for task in tasks),
        chat_template=all(task.chat_template for task in tasks),
    )
