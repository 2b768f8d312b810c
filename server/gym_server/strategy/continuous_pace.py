"""Decide when a continuous round is merged: once its admitted weight reaches ``rounds.merge_every``.

An update counts with its staleness weight times its share under the rule, so malicious updates that the rule rejects do
not fill a round. Tasks outlive their round, so no round waits for slow contributors. If a community is too small to
reach the weight, a round is merged once everybody who is expected to answer has done so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.merging import window_plan
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.window import MOST_SHARES, staleness_weight
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.rounds.continuous import WindowUpdates, known_versions, round_window
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import Round
from gym_server.state import HubState
from gym_server.strategy.lease_history import LeaseHistoryCache, OpenTask
from gym_server.strategy.pace import Pace

log = logging.getLogger("gym_server")


def pace_of(state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> Pace:
    """Return the pace for a hub's mode; a change of the mode takes effect after a restart."""
    mode = ContinuousPace if live_config.current.rounds.mode == "continuous" else Pace
    return mode(state, live_config, lease_histories)


class ContinuousPace(Pace):
    """The pace of continuous rounds. The rule is applied only when an arriving update may fill the round."""

    keeps_tasks = True

    def __init__(self, state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> None:
        super().__init__(state, live_config, lease_histories)
        self._weighed: tuple[int, list[str], float | None] = (0, [], None)
        """Cache: a round, the ids of its updates, and their admitted weight."""
        self._too_few = ""
        """Reason why the cached updates are too few for the rule; empty if they are not."""
        self._stuck: tuple[int, float] = (0, 0.0)
        """Cache: the round without a quorum in which nobody is working, and the time since then (Unix seconds)."""

    def summary(self) -> str:
        return self._live_config.current.rounds.in_words()

    def task_seconds(self, current: Round) -> float:
        rounds = self._live_config.current.rounds
        return rounds.deadline_seconds * (1 + rounds.max_staleness)

    def is_complete(self, current: Round) -> bool:
        """Return True if the round can be merged, or if its remaining tasks cannot complete it."""
        if self.has_quorum(current):
            return True
        outcomes = [task.outcome for task in self._tasks(current.server_round)]
        return self._is_abandoned(current.server_round, outcomes) or self._is_stuck(current, outcomes)

    def has_quorum(self, current: Round) -> bool:
        """Return True if the admitted weight is reached, or if enough have answered and no further answers are
        expected.

        False until the window has enough updates for the rule to withstand ``soup.num_malicious_nodes``.
        """
        rows = self._state.round_store.admitted(current.server_round)
        weight = self._admitted_weight(current, rows) if rows else None
        if weight is None:
            return False
        config = self._live_config.current.rounds
        if weight >= config.merge_every:
            return True
        return len(rows) >= config.min_contributors and not self._awaits_more(current, rows)

    def shortfall(self, current: Round) -> str:
        """Return why a round without enough updates has ended."""
        outcomes = [outcome for _, outcome in self._state.round_store.tasks(current.server_round).values()]
        admitted = len(self._state.round_store.admitted(current.server_round))
        failed, lost = outcomes.count("failed"), outcomes.count("lost")
        reason = (
            f"{counted(admitted, 'update')}: {counted(failed, 'contributor')} failed, {lost} disconnected, "
            "and nobody else is working"
        )
        is_known = self._too_few and self._weighed[0] == current.server_round
        return f"{reason} ({self._too_few})" if is_known else reason

    def _awaits_more(self, current: Round, rows: Sequence[Any]) -> bool:
        """Return True if a round below its weight should wait for tasks that are still open.

        It waits at most ``deadline_seconds`` from its first update and from the start of each task, and only for
        contributors that answered their last tasks. An account that only sends heartbeats therefore delays few rounds.
        """
        now, limit = self._state.clock.now(), self._live_config.current.rounds.deadline_seconds
        first = min(float(row.received_at) for row in rows)
        history = self._history(current.server_round)

        def is_awaited(task: OpenTask) -> bool:
            began = first if task.given_at is None else min(first, task.given_at)
            return not task.outcome and history.of(task).is_awaited and now < began + limit

        return any(is_awaited(task) for task in self._tasks(current.server_round))

    def _is_stuck(self, current: Round, outcomes: Sequence[str]) -> bool:
        """Return True if all tasks have ended without a quorum and the time for newcomers has passed.

        An account whose task failed gets another one only in the next round, so the wait after failures is short.
        """
        server_round, now = current.server_round, self._state.clock.now()
        if not outcomes or "" in outcomes:
            self._stuck = (0, 0.0)
            return False
        config = self._live_config.current.rounds
        seconds = config.lease_seconds if "failed" in outcomes else config.deadline_seconds
        if self._stuck[0] != server_round:
            self._stuck = (server_round, now)
            log.info(
                "round %d has no quorum: %s; it waits %g s for others",
                server_round,
                self.shortfall(current),
                seconds,
            )
        return now - self._stuck[1] >= seconds

    def _admitted_weight(self, current: Round, rows: Sequence[Any]) -> float | None:
        """Return the admitted weight of the round's updates, or an upper bound that is below ``merge_every``.

        Returns None while the window is too small for the rule.
        """
        ids = [row.update_id for row in rows]
        if self._weighed[:2] != (current.server_round, ids):
            weight = self._weight(current, [UpdateManifest.parse(row.manifest) for row in rows])
            self._weighed = (current.server_round, ids, weight)
        return self._weighed[2]

    def _weight(self, current: Round, manifests: Sequence[UpdateManifest]) -> float | None:
        config, self._too_few = self._live_config.current, ""
        versions = known_versions(self._state, config.rounds)
        manifests = [one for one in manifests if one.base_digest in versions]  # the merge rejects the others
        if not manifests:
            return None
        window = round_window(self._state, config.rounds, manifests)
        assert window is not None
        most = MOST_SHARES * sum(staleness_weight(age) for age in window.staleness)
        everyone = [*manifests, *window.others]
        weights = config.soup.weights([one.num_examples for one in everyone])
        try:
            Pipeline.of(config.soup).check(torch.tensor(weights, dtype=torch.float64))
        except GymError as error:
            if error.code is not ErrorCode.CONFIG_INVALID:
                raise
            self._too_few = error.message
            return None
        return most if most < window.merge_every else self._measured(current, manifests, window)

    def _measured(self, current: Round, manifests: Sequence[UpdateManifest], window: WindowUpdates) -> float:
        state, recipe = self._state, self._live_config.current.soup.for_round(current.server_round)
        spec = BaseSpec(state.base.model_name, state.round_store.head().digest, state.base.shapes)
        with ExitStack() as stack:
            files: list[Any] = [
                stack.enter_context(
                    DeltaFile.open(state.store.local_path(one.delta_sha256), spec, any_version=True)
                )
                for one in manifests
            ]
            weights = recipe.weights([one.num_examples for one in manifests])
            opened = window.opened(stack, state.store.local_path, spec, recipe)
            return sum(window_plan(files, weights, recipe, spec, opened)[1])
