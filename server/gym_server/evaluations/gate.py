"""The gate's evaluations, which compare a merged soup with its parent version on rows drawn by a secret seed.

A task's drop is the mean paired difference over those rows. The soup is rolled back if the lower confidence bound of
the drop is above the config's limit. 64 rows cannot resolve a drop of 2 points, so the bound keeps noise from ending a
round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.sections import GateEvaluation
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted
from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.results import TaskResult
from gym_fed.trust.ledger.evaluations import EVALUATED, drawn_rows, rows_digest
from gym_server.evaluations.records import write_result
from gym_server.evaluations.runner import SuiteTasks, mean_value, measure, prepare, suites_of
from gym_server.evaluations.seeds import seed_of
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.soups import Soup
from gym_server.state import HubState

log = logging.getLogger("gym_server")


@dataclass(frozen=True)
class TaskDrop:
    """The drop in one task's score that a soup causes.

    Attributes:
        task: Name of the task.
        metric: Name of the compared metric.
        before: Score of the parent version.
        after: Score with the soup.
        drop: Mean paired difference, positive if the soup is worse.
        bound: One-sided lower confidence bound of the drop.
        num_samples: Number of rows.
    """

    task: str
    metric: str
    before: float
    after: float
    drop: float
    bound: float
    num_samples: int


def drop_of(before: TaskResult, after: TaskResult, confidence: float) -> TaskDrop:
    """Return the drop of one task between two results on the same rows.

    Args:
        before: Result of the parent version.
        after: Result with the soup.
        confidence: One-sided confidence level, above 0.5.
    """
    metric = before.main_metric
    sign = 1.0 if before.figures[metric].higher_is_better else -1.0
    assert [s.row_sha256 for s in before.samples] == [s.row_sha256 for s in after.samples]
    paired = paired_difference(
        [sign * sample.metrics[metric] for sample in before.samples],
        [sign * sample.metrics[metric] for sample in after.samples],
        confidence=2 * confidence - 1,  # paired_difference takes a two-sided level
    )
    return TaskDrop(
        before.task,
        metric,
        float(before.figures[metric].value),
        float(after.figures[metric].value),
        paired.difference,
        paired.lower,
        paired.num_samples,
    )


@dataclass(frozen=True)
class SuiteOutcome:
    """The results of one suite for the parent version and the soup."""

    config: GateEvaluation
    before: Mapping[str, TaskResult]
    after: Mapping[str, TaskResult]
    total_rows: Mapping[str, int]
    drops: Sequence[TaskDrop]
    records: Mapping[str, str]

    @property
    def worst(self) -> TaskDrop | None:
        """Return the task with the largest drop beyond the limit; None if there is none."""
        fallen = [one for one in self.drops if one.bound > self.config.max_drop]
        return max(fallen, key=lambda one: one.bound, default=None)


class RoundEvaluation:
    """The evaluation of one round's soup.

    Args:
        state: The hub's state.
        config: The hub's config.
        model: The model that the round starts from.
        server_round: Number of the round.
        suites: Suites from ``suites_of``.

    Attributes:
        outcomes: The result of each suite, after ``run``.
    """

    def __init__(
        self,
        state: HubState,
        config: ServerConfig,
        model: HubModel,
        server_round: int,
        suites: Sequence[SuiteTasks],
    ) -> None:
        self._state, self._config = state, config
        self._model = model
        self._round = server_round
        self._seed = seed_of(state.database, server_round)
        self._totals: dict[str, int] = {}
        self._prepared = [
            prepare(suite, model.model, model.tokenizer, partial(self._draw, suite.config.limit))
            for suite in suites
        ]
        self._suites = suites
        self._soup = self._version = ""
        self.outcomes: list[SuiteOutcome] = []

    def run(self, soup: Soup, version: str) -> str:
        """Evaluate both models, and write the records.

        Args:
            soup: The round's soup.
            version: Digest of the version that the soup creates.

        Returns:
            The reason for rolling the soup back; empty if it passes.
        """
        self._soup, self._version = soup.report.sha256, version
        before = self._measured()
        failpoint("evaluated-before")
        with self._model.applied(soup.path):
            after = self._measured()
        failpoint("evaluated-after")
        for suite, old, new in zip(self._suites, before, after, strict=True):
            drops = [drop_of(old[name], new[name], suite.config.confidence) for name in old]
            records = {
                "before": write_result(
                    self._config,
                    self._state.folder,
                    self._state.server,
                    suite,
                    old,
                    self._model.digest,
                    self._model.settings,
                    self._round,
                ),
                "after": write_result(
                    self._config,
                    self._state.folder,
                    self._state.server,
                    suite,
                    new,
                    self._version,
                    self._model.settings,
                    self._round,
                ),
            }
            totals = {name: self._totals[name] for name in old}
            self.outcomes.append(SuiteOutcome(suite.config, old, new, totals, drops, records))
        failpoint("evaluation-recorded")
        reasons = [_reason(found) for found in self.outcomes if found.worst is not None]
        return "; ".join(reasons)

    def value_with(self, soup: Soup) -> float:
        """Return another soup's mean score over all tasks, on the same rows; higher is better."""
        with self._model.applied(soup.path):
            found = self._measured()
        return sum(map(mean_value, found)) / len(found)

    @property
    def value(self) -> float:
        """Return ``value_with`` of the round's own soup."""
        return sum(mean_value(found.after) for found in self.outcomes) / len(self.outcomes)

    def write(self, outcome: str, tx: Connection, height: int | None = None) -> None:
        """Append the ledger entry, which reveals the seed; call it in the transaction that ends the round."""
        self._state.ledger.append(tx, EVALUATED, self._body(outcome, height))

    def on_commit(self) -> Callable[[Connection, int], None]:
        """Return the callback for ``SoupRecord.also``."""
        return lambda tx, height: self.write("committed", tx, height)

    def _draw(self, limit: int, task: str, total: int) -> list[int]:
        self._totals[task] = total
        return drawn_rows(self._seed, task, total, limit)

    def _measured(self) -> list[dict[str, TaskResult]]:
        return [measure(self._model.model, self._model.tokenizer, one) for one in self._prepared]

    def _body(self, outcome: str, height: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "server_round": self._round,
            "outcome": outcome,
            "parent": self._model.digest,
            "soup": self._soup,
            "digest": self._version,
            "seed": self._seed.hex(),
            "suites": [self._suite(found) for found in self.outcomes],
        }
        return body if height is None else {**body, "height": height}

    def _suite(self, found: SuiteOutcome) -> dict[str, Any]:
        config = found.config
        return {
            "suite": config.suite,
            "limit": config.limit,
            "max_drop": config.max_drop,
            "confidence": config.confidence,
            "records": dict(found.records),
            "tasks": {one.task: self._task(found, one) for one in found.drops},
        }

    def _task(self, found: SuiteOutcome, one: TaskDrop) -> dict[str, Any]:
        before, after = (side[one.task].figures[one.metric] for side in (found.before, found.after))
        total, limit = found.total_rows[one.task], found.config.limit
        return {
            "metric": one.metric,
            "num_samples": one.num_samples,
            "before": one.before,
            "before_stderr": before.stderr,
            "after": one.after,
            "after_stderr": after.stderr,
            "drop": one.drop,
            "bound": one.bound,
            "lock": found.after[one.task].lock,
            "total_rows": total,
            "rows_sha256": rows_digest(drawn_rows(self._seed, one.task, total, limit)),
        }


def evaluation_of(
    state: HubState, config: ServerConfig, model: HubModel, server_round: int
) -> RoundEvaluation | None:
    """Return the evaluation that the config defines for a round; None if it defines none."""
    if not config.gate.evals:
        return None
    return RoundEvaluation(state, config, model, server_round, suites_of(config.gate, state.folder))


def _reason(found: SuiteOutcome) -> str:
    worst, config = found.worst, found.config
    assert worst is not None
    others = sum(one.bound > config.max_drop for one in found.drops) - 1
    more = f", and {counted(others, 'more task')} dropped too far" if others else ""
    task = worst.task if worst.task == config.suite else f"{worst.task} of {config.suite}"
    return (
        f"rolled back: the soup changes {task} from {worst.before:.4f} to {worst.after:.4f} "
        f"({worst.metric}, {counted(worst.num_samples, 'row')}); the drop of {worst.drop:.4f} is at least "
        f"{worst.bound:.4f} with {config.confidence:.0%} confidence; allowed: {config.max_drop:g}{more}"
    )
