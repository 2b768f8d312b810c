"""Whether one's own rows were checked against the suites that a hub evaluates its versions on."""

from __future__ import annotations

from collections.abc import Mapping

from gym_fed.config.hub.evaluations import evaluation_names
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.canonical import canonical_digest


def evaluation_notes(evaluated_on: Mapping[str, str]) -> list[str]:
    """A line for each suite of a task that rows here are not checked against, or not against the same rows.

    Args:
        evaluated_on: Of the task. Names are a stranger's: only those of gym-fed's own suites and tasks are looked up.
    """
    return [note for suite, digest in evaluated_on.items() if (note := _note(suite, digest))]


def _note(suite: str, digest: str) -> str:
    from gym_fed.evaluation.contamination.check import filters_here
    from gym_fed.evaluation.suites.tasks import tasks_of

    names, beginnings = evaluation_names()
    begin = f"the hub evaluates on {suite}"
    if suite not in names and (not suite.startswith(beginnings) or "." in suite):
        return f"{begin}, rows of its own: yours are not checked against them"
    try:
        tasks = tasks_of([suite])
        checked = {task for found in filters_here() for task in found.locks}
    except GymError as error:
        if error.code is ErrorCode.UNAVAILABLE:
            return f"{begin}, whose rows are not here: yours are not checked against them (gym eval fetch {suite})"
        return f"{begin}: your rows are not checked against it: {error.message}"
    if missing := [task.name for task in tasks if task.name not in checked]:
        return f"{begin}: your rows are not checked against {missing[0]}, as its suite is here in part"
    if canonical_digest({task.name: task.lock for task in tasks}) != digest:
        return f"{begin}, with other rows than those here, which yours were checked against"
    return ""
