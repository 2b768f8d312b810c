"""Evaluations of versions on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gym_fed.config.hub.evaluations import GateEvaluation
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.tables import TextTable
from gym_fed.evaluation.records.reader import find_record
from gym_fed.evaluation.results import EvalResults, TaskResult
from gym_server.evaluations.records import identity_of, records_folder, write_result
from gym_server.evaluations.runner import SuiteTasks, measure, prepare, tasks_named
from gym_server.federation import Federation
from gym_server.rounds.hub_model import HubModel


def evaluate_versions(
    fed: Federation,
    heights: Sequence[int],
    suites: Sequence[str],
    limit: int,
    chat: bool | None = None,
    on_begin: Callable[[int, str], None] = lambda height, suite: None,
) -> list[dict[str, Any]]:
    """Evaluate versions on the first rows of suites; what was evaluated before is read from its record.

    Args:
        fed: The hub, running or not.
        heights: Of the versions; none: all.
        suites: By name; none: those of ``gate.evals``, or ``tiny``.
        limit: Most rows of each task.
        chat: Whether to use the chat template; None: as ``gate.evals`` has it for the suite.
        on_begin: Called with version and suite before each that has no record.

    Returns:
        By version and task: ``version``, ``digest``, ``suite``, ``task``, ``metric``, ``value``, ``stderr``,
        ``num_samples``, ``cached``.

    Raises:
        GymError: ``NOT_FOUND`` for a version that does not exist; as ``tasks_named`` and ``measure``.
    """
    newest = fed.round_store.newest_height()
    wanted = sorted(set(heights)) or list(range(newest + 1))
    if outside := [height for height in wanted if not 0 <= height <= newest]:
        raise GymError(
            ErrorCode.NOT_FOUND, f"there is no version {outside[0]}", f"versions 0 to {newest} exist"
        )
    found = [_suite(fed, name, limit, chat) for name in suites or _own_suites(fed)]
    gate = fed.config.gate.model_copy(update={"heldout": None})
    model = HubModel(fed.base, fed.config.base_model, fed.store, gate, fed.folder)
    lines: list[dict[str, Any]] = []
    for height in wanted:
        digest = fed.round_store.version(height).digest
        for suite in found:
            results = find_record(identity_of(fed, suite, digest, model.settings, None), records_folder(fed))
            is_cached = results is not None
            if results is None:
                on_begin(height, suite.config.suite)
                model.follow(fed.round_store.soups(height) if height else [])
                results = _evaluated(fed, suite, model)
            lines += _lines(height, digest, suite, results.tasks.values(), is_cached)
    return lines


def _own_suites(fed: Federation) -> list[str]:
    return [one.suite for one in fed.config.gate.evals] or ["tiny"]


def _suite(fed: Federation, name: str, limit: int, chat: bool | None) -> SuiteTasks:
    own = next((one for one in fed.config.gate.evals if one.suite == name), None)
    applied = own.apply_chat_template if chat is None and own is not None else chat
    evaluation = GateEvaluation.model_construct(suite=name, limit=limit, apply_chat_template=applied)
    return SuiteTasks(evaluation, tasks_named(name, fed.config.gate, fed.folder))


def _evaluated(fed: Federation, suite: SuiteTasks, model: HubModel) -> EvalResults:
    begin = time.monotonic()
    first = prepare(
        suite, model.model, model.tokenizer, lambda task, total: range(min(total, suite.config.limit))
    )
    tasks = measure(model.model, model.tokenizer, first)
    write_result(fed, suite, tasks, model.digest, model.settings, None, time.monotonic() - begin)
    results = find_record(identity_of(fed, suite, model.digest, model.settings, None), records_folder(fed))
    assert results is not None
    return results


def _lines(
    height: int, digest: str, suite: SuiteTasks, tasks: Iterable[TaskResult], is_cached: bool
) -> list[dict[str, Any]]:
    return [
        {
            "version": height,
            "digest": digest,
            "suite": suite.config.suite,
            "task": task.task,
            "metric": task.main_metric,
            "value": task.figures[task.main_metric].value,
            "stderr": task.figures[task.main_metric].stderr,
            "num_samples": task.figures[task.main_metric].num_samples,
            "cached": is_cached,
        }
        for task in tasks
    ]


def versions_table(lines: Sequence[dict[str, Any]]) -> TextTable:
    """A row for each task, a column for each version."""
    heights = sorted({line["version"] for line in lines})
    table = TextTable("task", "metric", "rows", *(f"version {height}" for height in heights))
    by_place = {(line["suite"], line["task"], line["version"]): line for line in lines}
    for suite, task in dict.fromkeys((line["suite"], line["task"]) for line in lines):
        of_task = [by_place[suite, task, height] for height in heights]
        first = of_task[0]
        table.add_row(task, first["metric"], str(first["num_samples"]), *map(_figure, of_task))
    return table


def _figure(line: dict[str, Any]) -> str:
    error = line["stderr"]
    return f"{line['value']:.3f}" if error is None else f"{line['value']:.3f} ± {error:.3f}"
