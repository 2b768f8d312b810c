"""The `.eval_results` files of a model repository of the Hub, from the figures of a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from gym_fed.evaluation.records.hub_yaml import HubDataset, eval_results_yaml
from gym_fed.evaluation.results import EvalResults, Figure, TaskResult
from gym_fed.evaluation.suites.listing import listing
from gym_fed.evaluation.suites.members import members
from gym_fed.registry.card.evaluations import CardFigure

FOLDER = ".eval_results"


def hub_results(figures: Sequence[CardFigure]) -> dict[str, str]:
    """YAML by the file's path, one file for each record with a task whose data set the Hub has.

    Figures whose number of examples in the prompt is not stated are left out: they could be compared with none.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for tasks of the harness where it is not installed.
    """
    found = {}
    for record in dict.fromkeys(figure.record for figure in figures):
        of_it = [one for one in figures if one.record == record and one.num_fewshot is not None]
        tasks = _tasks(of_it)
        if datasets := hub_datasets(tasks):
            results = EvalResults("", {}, tasks, 0.0)
            text = eval_results_yaml(results, datasets, date=of_it[0].date or None)
            found[f"{FOLDER}/{PurePath(record).stem}.yaml"] = text
    return found


def hub_datasets(tasks: Iterable[str]) -> dict[str, HubDataset]:
    """Where the Hub has the rows of those tasks that are not ours."""
    found, wanted = {}, list(tasks)
    for name, entry in listing().tasks.items():
        hub = None if entry.dataset is None else listing().datasets[entry.dataset].hub
        if hub is None or not any(task.startswith(name) for task in wanted):
            continue
        for task, (subset, _) in members(name).items():
            if task in wanted:
                found[task] = HubDataset(hub, subset or "default")
    return found


def _tasks(figures: Sequence[CardFigure]) -> Mapping[str, TaskResult]:
    by_task: dict[str, dict[str, Figure]] = {}
    shots: dict[str, int] = {}
    for one in figures:
        assert one.num_fewshot is not None
        figure = Figure(one.value, one.stderr, one.num_samples or 0, True)
        by_task.setdefault(one.task, {})[one.metric] = figure
        shots[one.task] = one.num_fewshot
    return {task: TaskResult(task, "", shots[task], found, (), "") for task, found in by_task.items()}
