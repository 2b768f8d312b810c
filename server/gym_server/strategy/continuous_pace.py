"""Decide when a continuous round is merged: as soon as the admitted weight reaches ``rounds.merge_every``.

An update counts with its staleness weight times its share under the rule. So malicious updates that the rule rejects do
not fill a round. No round waits for the slow, and none ends without them: their tasks are
carried into the next round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.merging import window_plan
from gym_fed.soup.window import MOST_SHARES, staleness_weight
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.rounds.continuous import WindowUpdates, round_window
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import Round
from gym_server.state import HubState
from gym_server.strategy.lease_history import LeaseHistoryCache
from gym_server.strategy.pace import Pace


def pace_of(state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> Pace:
    """Return the pace of a hub's mode; a change of the mode takes effect when the hub starts again."""
    mode = ContinuousPace if live_config.current.rounds.mode == "continuous" else Pace
    return mode(state, live_config, lease_histories)


class ContinuousPace(Pace):
    """The pace of a hub with continuous rounds. The rule is applied when an update arrives that may fill the round."""

    keeps_tasks = True

    def __init__(self, state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> None:
        super().__init__(state, live_config, lease_histories)
        self._weighed: tuple[list[str], float | None] = ([], None)
        """Cache: ids of the round's updates, and their admitted weight."""

    def summary(self) -> str:
        return self._live_config.current.rounds.in_words()

    def task_seconds(self, current: Round) -> float:
        rounds = self._live_config.current.rounds
        return rounds.deadline_seconds * (1 + rounds.max_staleness)

    def is_complete(self, current: Round) -> bool:
        """Return True if the round can be merged, or if all tasks failed or were lost."""
        if self.has_quorum(current):
            return True
        outcomes = [outcome for _, outcome in self._state.round_store.tasks(current.server_round).values()]
        return self._is_abandoned(current.server_round, outcomes)

    def has_quorum(self, current: Round) -> bool:
        """Return True if the admitted weight is reached, or if nobody is at work and enough have answered.

        Never before the window has as many updates as the rule needs to withstand ``soup.num_malicious_nodes``.
        """
        rows = self._state.round_store.admitted(current.server_round)
        if not rows:
            return False
        config = self._live_config.current
        weight = self._admitted_weight(rows)
        if weight is None:
            return False
        if weight >= config.rounds.merge_every:
            return True
        tasks = self._state.round_store.tasks(current.server_round).values()
        return len(rows) >= config.rounds.min_contributors and all(outcome for _, outcome in tasks)

    def shortfall(self, current: Round) -> str:
        """Return why a round without enough updates has ended."""
        outcomes = [outcome for _, outcome in self._state.round_store.tasks(current.server_round).values()]
        admitted = len(self._state.round_store.admitted(current.server_round))
        failed, lost = outcomes.count("failed"), outcomes.count("lost")
        return (
            f"{counted(admitted, 'update')}: {counted(failed, 'contributor')} failed, {lost} went away, "
            "and nobody else is working"
        )

    def _admitted_weight(self, rows: Sequence[Any]) -> float | None:
        """Return the admitted weight of the round's updates, or an upper bound that is below ``merge_every``.

        None while the window is too small for the rule.
        """
        ids = [row.update_id for row in rows]
        if self._weighed[0] != ids:
            self._weighed = (ids, self._weight([UpdateManifest.parse(row.manifest) for row in rows]))
        return self._weighed[1]

    def _weight(self, manifests: Sequence[UpdateManifest]) -> float | None:
        config = self._live_config.current
        try:
            window = round_window(self._state, config.rounds, manifests)
        except KeyError:  # a version was rolled back meanwhile; the merge rejects its updates
            return math.inf
        assert window is not None
        most = MOST_SHARES * sum(staleness_weight(age) for age in window.staleness)
        try:
            config.soup.check_feasible(len(manifests) + len(window.others))
            return most if most < window.merge_every else self._measured(manifests, window)
        except GymError as error:
            if error.code is not ErrorCode.CONFIG_INVALID:
                raise
            return None  # a rule needs more updates

    def _measured(self, manifests: Sequence[UpdateManifest], window: WindowUpdates) -> float:
        state, recipe = self._state, self._live_config.current.soup
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
