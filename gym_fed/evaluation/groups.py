"""Groups of tasks, such as the 57 subjects of MMLU, pooled as one task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.results import EvalResults, Figure, TaskResult


def with_groups(results: EvalResults, group_of: Mapping[str, str]) -> EvalResults:
    """Return results with a pooled entry before each group of several tasks.

    A group's figure is the mean over all rows of its tasks, so larger tasks have more weight, as
    lm-evaluation-harness does for MMLU; the standard error is that of this mean.

    Args:
        results: The results of the tasks.
        group_of: The group of each task.
    """
    members: dict[str, list[TaskResult]] = {}
    for name, task in results.tasks.items():
        members.setdefault(group_of.get(name, name), []).append(task)
    made: dict[str, TaskResult] = {}
    for group, tasks in members.items():
        if len(tasks) > 1 and _can_be_pooled(tasks):
            pooled = _pooled(f"{group} ({len(tasks)} tasks)", tasks)
            made[pooled.task] = pooled
        made |= {task.task: task for task in tasks}
    return replace(results, tasks=made)


def groups_of(names: Iterable[str]) -> dict[str, str]:
    """Return the group of each task, for groups of several tasks."""
    from gym_fed.evaluation.suites.definitions import members
    from gym_fed.evaluation.suites.listing import listing

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
                continue  # without the harness its groups are unknown
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
    made = []
    for (group, metric), figures_found in members.items():
        if len(figures_found) == 1:
            made += figures_found
            continue
        rows = sum(figure.num_samples for figure in figures_found)
        mean = sum(figure.value * figure.num_samples for figure in figures_found) / max(rows, 1)
        made.append(BriefFigure(f"{group} ({len(figures_found)} tasks)", metric, mean, rows))
    return made


def listed(texts: Sequence[str], room: int) -> str:
    """Join texts with commas, as many as fit, and count the others."""
    first_texts = list(texts[: room // 2])
    while True:
        more = f", and {len(texts) - len(first_texts)} more" if len(first_texts) < len(texts) else ""
        shown = ", ".join(first_texts) + more
        if len(shown) <= room or len(first_texts) <= 1:
            return shown
        first_texts.pop()


def _can_be_pooled(tasks: Sequence[TaskResult]) -> bool:
    """Return True if the tasks share their metric and have all samples, which a foreign record may lack."""
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
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    figure = Figure(float(values.mean()), error, len(values), tasks[0].figures[metric].higher_is_better)
    return replace(
        tasks[0],
        task=name,
        figures={metric: figure},
        samples=samples,
        lock=",".join(task.lock for task in tasks),
        chat_template=all(task.chat_template for task in tasks),
    )
