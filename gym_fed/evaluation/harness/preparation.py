"""Prepare the requests of tasks once, and compute metrics from each model's outcomes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.harness.encoder import encoder_of
from gym_fed.evaluation.harness.isolation import (
    offline,
    patterns_bounded,
    register_bounded_filter,
    seeded,
    templates_kept,
)
from gym_fed.evaluation.harness.sources import Outcome, PromptOptions, RequestKey, TaskSource
from gym_fed.evaluation.harness.task import HarnessTask
from gym_fed.evaluation.results import TaskResult


def require_harness() -> None:
    """Require the harness to be installed.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "evaluations need lm-eval", "pip install 'gym-fed[eval]'"
        )


def harness_version() -> str:
    """Return the version of lm-evaluation-harness, part of a result's identity since prompts and metrics depend on
    it."""
    return f"lm-eval {version('lm-eval')}"


class Preparation:
    """The requests of some tasks for one tokenizer.

    Args:
        sources: The tasks.
        tokenizer: The models' tokenizer.
        max_length: The models' context in tokens.
        options: Options of prompts.

    Attributes:
        requests: All of them, in the order of tasks and rows.

    Raises:
        GymError: ``MISSING_DEPENDENCY``; ``CONFIG_INVALID`` for a task that would use a network, or that the harness
            refuses; ``USAGE`` for a chat template that the tokenizer does not have.
    """

    def __init__(
        self, sources: Sequence[TaskSource], tokenizer: Any, max_length: int, options: PromptOptions
    ) -> None:
        require_harness()
        if options.apply_chat_template and not tokenizer.chat_template:
            raise GymError(
                ErrorCode.USAGE,
                "the tokenizer has no chat template",
                "leave --apply-chat-template out, or set one: gym configs templates lists them",
            )
        self._tasks: dict[str, HarnessTask] = {}
        register_bounded_filter()
        with offline(), seeded(), templates_kept():
            encoder = encoder_of(tokenizer, max_length)
            for source in sources:
                self._tasks[source.name] = HarnessTask(source, encoder, options)
        self.requests = tuple(request for task in self._tasks.values() for request in task.requests)

    def results(self, outcomes: Mapping[RequestKey, Outcome]) -> dict[str, TaskResult]:
        """Compute metrics and samples by task from one model's outcomes.

        Raises:
            GymError: ``DATA_INVALID`` for a row that the task's metric cannot read.
        """
        with offline(), seeded(), templates_kept(), patterns_bounded():
            return {name: task.result(outcomes) for name, task in self._tasks.items()}
