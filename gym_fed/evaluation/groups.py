"""Groups of tasks, such as the 57 subjects of MMLU, as one task of all their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gym_fed.evaluation.results import EvalResults, Figure, TaskResult


def with_groups(results: EvalResults, group_of: Mapping[str, str]) -> EvalResults:
    """Results in which each group of several tasks has an entry of its own before them.

    A group's figure is the mean over all rows of its tasks, so that larger tasks weigh more, as lm-evaluation-harness
    has it for MMLU; its standard error is that of this mean.

    Args:
        results: Of the tasks.
        group_of: The group of each task.
    """
    members: dict[str, list[TaskResult]] = {}
    for name, task in results.tasks.items():
        members.setdefault(group_of.get(name, name), []).append(task)
    made: dict[str, TaskResult] = {}
    for group, tasks in members.items():
        if len(tasks) > 1 and len({task.main_metric for task in tasks}) == 1:
            pooled = _pooled(f"{group} ({len(tasks)} tasks)", tasks)
            made[pooled.task] = pooled
        made |= {task.task: task for task in tasks}
    return replace(results, tasks=made)


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
