"""Evaluate versions on request (`gym-server eval`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gym_fed.config.hub.sections import GateEvaluation
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.console import TextTable
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.reader import find_record
from gym_fed.evaluation.results import EvalResults, TaskResult
from gym_server.evaluations.records import identity_of, records_folder, write_result
from gym_server.evaluations.runner import SuiteTasks, measure, prepare, tasks_named
from gym_server.rounds.hub_model import HubModel
from gym_server.state import HubState


def evaluate_versions(
    state: HubState,
    config: ServerConfig,
    heights: Sequence[int],
    suites: Sequence[str],
    limit: int,
    chat: bool | None = None,
    on_begin: Callable[[int, str], None] = lambda height, suite: None,
) -> list[dict[str, Any]]:
    """Evaluate versions on the first rows of suites, reusing recorded results.

    Args:
        state: The hub's state.
        config: The hub's config.
        heights: Heights of the versions; empty means all.
        suites: Names of the suites; empty means those of ``gate.evals``, or ``tiny``.
        limit: Maximum number of rows per task.
        chat: True to use the chat template; None uses the suite's setting in ``gate.evals``.
        on_begin: Called with version and suite before each evaluation that has no record.

    Returns:
        One entry per version and task: ``version``, ``digest``, ``suite``, ``task``, ``metric``, ``value``, ``stderr``,
        ``num_samples``, ``cached``.

    Raises:
        GymError: ``NOT_FOUND`` for a version that does not exist; errors from ``tasks_named`` and ``measure``.
    """
    newest = state.round_store.newest_height()
    selected = sorted(set(heights)) or list(range(newest + 1))
    if outside := [height for height in selected if not 0 <= height <= newest]:
        raise GymError(
            ErrorCode.NOT_FOUND, f"there is no version {outside[0]}", f"versions 0 to {newest} exist"
        )
    found = [_suite(config, state.folder, name, limit, chat) for name in suites or _own_suites(config)]
    gate = config.gate.model_copy(update={"heldout": None})
    model = HubModel(state.base, config.base_model, state.store, gate, state.folder)
    lines: list[dict[str, Any]] = []
    for height in selected:
        digest = state.round_store.version(height).digest
        for suite in found:
            results = find_record(
                identity_of(state.server, suite, digest, model.settings, None), records_folder(state.folder)
            )
            is_cached = results is not None
            if results is None:
                on_begin(height, suite.config.suite)
                model.follow(state.round_store.soups(height) if height else [])
                results = _evaluated(config, state.folder, state.server, suite, model)
            lines += _lines(height, digest, suite, results.tasks.values(), is_cached)
    return lines


def _own_suites(config: ServerConfig) -> list[str]:
    return [one.suite for one in config.gate.evals] or ["tiny"]


def _suite(config: ServerConfig, folder: Path, name: str, limit: int, chat: bool | None) -> SuiteTasks:
    own = next((one for one in config.gate.evals if one.suite == name), None)
    applied = own.apply_chat_template if chat is None and own is not None else chat
    evaluation = GateEvaluation.model_construct(suite=name, limit=limit, apply_chat_template=applied)
    return SuiteTasks(evaluation, tasks_named(name, config.gate, folder))


def _evaluated(
    config: ServerConfig, folder: Path, server: str, suite: SuiteTasks, model: HubModel
) -> EvalResults:
    begin = time.monotonic()
    first = prepare(
        suite, model.model, model.tokenizer, lambda task, total: range(min(total, suite.config.limit))
    )
    tasks = measure(model.model, model.tokenizer, first)
    write_result(
        config, folder, server, suite, tasks, model.digest, model.settings, None, time.monotonic() - begin
    )
    results = find_record(
        identity_of(server, suite, model.digest, model.settings, None), records_folder(folder)
    )
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
    """Return a table with a row per task and a column per version."""
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
