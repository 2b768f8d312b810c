"""Decide when a round stops collecting updates.

If rounds waited for everybody, a contributor that only sends heartbeats could block them. If they waited for a fixed
number of updates, only the fastest contributors would take part. The quorum is therefore a share of the tasks that were
handed out, and contributors still at work get a grace period based on their earlier tasks. Accounts that blocked
earlier rounds by not answering do not count (``gym_server.strategy.lease_history``).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

from sqlalchemy import Select, select

from gym_fed.config.hub.sections import RoundsConfig
from gym_fed.core.text import counted, readable_seconds
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import COMMITTED, Round
from gym_server.state import HubState
from gym_server.store.tables import rounds, secure_messages, secure_stages
from gym_server.strategy.lease_history import (
    LEARNED_ROUNDS,
    MAX_UNANSWERED,
    REMEMBERED_ROUNDS,
    LeaseHistory,
    LeaseHistoryCache,
    OpenTask,
    expected_seconds,
    open_tasks,
    resting_contributors,
)
from gym_server.strategy.tasks import task_of

log = logging.getLogger("gym_server")

QUANTILE = 0.9
FIRST_SHARE = 0.25
"""Expected duration of a task without history, as a fraction of the deadline."""
_MIN_KNOWN = 3


def grace_ends(
    config: RoundsConfig, known: Sequence[float], started_at: float, quorum_at: float, deadline_seconds: float
) -> float:
    """Return the time at which a stage of a secure round ends without the missing answers, in Unix seconds.

    Args:
        config: Factor and bounds of the grace period.
        known: Durations from start to answer in earlier rounds, in seconds.
        started_at: Start of the stage, Unix seconds.
        quorum_at: Unix time at which there were enough answers.
        deadline_seconds: Maximum duration of the stage.
    """
    if len(known) < _MIN_KNOWN:
        wanted = FIRST_SHARE * deadline_seconds
    else:
        usual = sorted(known)[min(len(known) - 1, int(QUANTILE * len(known)))]
        wanted = started_at + config.grace_factor * usual - quorum_at
    most = config.grace_max_seconds if config.grace_max_seconds is not None else config.deadline_seconds / 2
    grace = min(max(wanted, config.grace_min_seconds), max(most, config.grace_min_seconds))
    return min(quorum_at + grace, started_at + deadline_seconds)


class Pace:
    """Decides when a hub's rounds are complete. The history of earlier rounds is read once per round."""

    keeps_tasks: ClassVar[bool] = False
    """True if tasks stay open when their round is merged."""

    def __init__(self, state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> None:
        self._state, self._live_config = state, live_config
        self._lease_histories = lease_histories
        self._stage: tuple[int, str, list[float]] = (0, "", [])
        """Cache: round, stage of secure aggregation, and durations of its answers in earlier rounds (seconds)."""
        self._abandoned: tuple[int, float] = (0, 0.0)
        """Cache: the round whose tasks are all lost or failed, and the time since then (Unix seconds)."""
        self._logged_quorum = 0

    def summary(self) -> str:
        """Return the quorum as text."""
        rounds = self._live_config.current.rounds
        share = f"more than {rounds.quorum_share:.0%} of those given the task"
        return f"quorum {rounds.min_contributors}, and {share}"

    def task_seconds(self, current: Round) -> float:
        """Return the time limit of a task that is handed out now, in seconds."""
        return max(60.0, task_of(current).deadline_seconds - self._state.clock.now())

    def resting(self, server_round: int) -> set[str]:
        """Return the contributors that lost the round's task several times and must wait before they get it again."""
        lease_seconds = self._live_config.current.rounds.lease_seconds
        with self._state.database.reading() as tx:
            return resting_contributors(tx, server_round, lease_seconds, self._state.clock.now())

    def is_complete(self, current: Round) -> bool:
        """Return True if a round need not collect any longer.

        This is the case if all have answered, the grace period or the deadline has passed, or nobody is left.
        """
        assert current.spec is not None
        server_round, now = current.server_round, self._state.clock.now()
        if now >= current.spec.deadline_seconds:
            return True
        tasks = self._tasks(server_round)
        outcomes = [task.outcome for task in tasks]
        quorum_at = self._quorum_at(current, tasks)
        if quorum_at is None:
            return self._is_abandoned(server_round, outcomes)
        ends = self._grace_ends(current, tasks, quorum_at)
        self._log_quorum(server_round, tasks, ends - now)
        return "" not in outcomes or now >= ends

    def has_quorum(self, current: Round) -> bool:
        """Return True if enough of the tasks handed out are answered, so that the round may be merged."""
        return self._quorum_at(current, self._tasks(current.server_round)) is not None

    def shortfall(self, current: Round) -> str:
        """Return the reason why a round below its quorum has ended."""
        assert current.spec is not None
        tasks = self._tasks(current.server_round)
        admitted = len(self._state.round_store.admitted(current.server_round))
        history = self._history(current.server_round)
        needed = self._live_config.current.rounds.quorum(history.num_counted(tasks))
        short = f"{admitted} of {counted(needed, 'update')}"
        outcomes = [task.outcome for task in tasks]
        working = outcomes.count("")
        if self._state.clock.now() < current.spec.deadline_seconds:
            failed, lost = outcomes.count("failed"), outcomes.count("lost")
            return f"{short}: {counted(failed, 'contributor')} failed, {lost} disconnected, and nobody else is working"
        if not working:
            return f"{short} at the deadline"
        working_tasks = [task for task in tasks if not task.outcome]
        known = [seconds for task in working_tasks if (seconds := expected_seconds(task, history.of(task)))]
        slowest = f", the slowest for about {readable_seconds(max(known))}" if known else ""
        return (
            f"{short} at the deadline: {working} of {counted(len(tasks), 'contributor')} still working{slowest}; "
            f"raise rounds.deadline_seconds ({self._live_config.current.rounds.deadline_seconds:g})"
        )

    def round_ends(self, current: Round, quorum: int | None = None) -> float | None:
        """Return the latest time at which a collecting round is merged, in Unix seconds; None before the quorum.

        Each contributor still at work gets ``grace_factor`` times its usual duration, counted from the start of its
        task. Those who left their last tasks unanswered get ``grace_min_seconds``.

        Args:
            current: The round.
            quorum: Number of updates needed; None computes it from the tasks that were handed out.
        """
        assert current.spec is not None
        tasks = self._tasks(current.server_round)
        quorum_at = self._quorum_at(current, tasks, quorum)
        return None if quorum_at is None else self._grace_ends(current, tasks, quorum_at)

    def _grace_ends(self, current: Round, tasks: Sequence[OpenTask], quorum_at: float) -> float:
        assert current.spec is not None
        config, deadline = self._live_config.current.rounds, current.spec.deadline_seconds
        history, began = self._history(current.server_round), deadline - config.deadline_seconds
        wanted = [quorum_at]
        for task in tasks:
            record = history.of(task)
            if task.outcome or not record.is_awaited:
                continue
            given_at = began if task.given_at is None else task.given_at
            seconds = expected_seconds(task, record) or FIRST_SHARE * config.deadline_seconds
            ends = given_at + config.grace_factor * seconds
            if record.unanswered:
                # Its heartbeats are claims that were not kept, so only the duration of an answer counts for more than
                # half the deadline.
                shown = given_at + config.grace_factor * record.slowest_answer
                ends = min(ends, max(quorum_at + config.deadline_seconds / 2, shown))
            wanted.append(ends)
        most = math.inf if config.grace_max_seconds is None else config.grace_max_seconds
        grace = max(config.grace_min_seconds, min(max(wanted) - quorum_at, most))
        return min(quorum_at + grace, deadline)

    def stage_ends(self, server_round: int, stage: str, started_at: float, quorum: int) -> float | None:
        """Return the end of a secure aggregation stage, after at most ``stage_seconds``; None before ``quorum``
        answers.
        """
        secure = self._live_config.current.secure_aggregation
        assert secure is not None
        where = (secure_messages.c.server_round == server_round) & (secure_messages.c.stage == stage)
        with self._state.database.reading() as tx:
            replied = tx.scalars(
                select(secure_messages.c.replied_at)
                .where(where, secure_messages.c.outcome == "replied")
                .order_by(secure_messages.c.replied_at)
            ).all()
        if len(replied) < quorum:
            return None
        known = self._of_stage(server_round, stage)
        config, quorum_at = self._live_config.current.rounds, replied[quorum - 1]
        return grace_ends(
            config, known, started_at, float(quorum_at or self._state.clock.now()), secure.stage_seconds
        )

    def _tasks(self, server_round: int) -> list[OpenTask]:
        with self._state.database.reading() as tx:
            return open_tasks(tx, server_round, self._live_config.current.rounds.lease_seconds)

    def _history(self, server_round: int) -> LeaseHistory:
        """Return the history of tasks of the rounds before this one."""
        with self._state.database.reading() as tx:
            return self._lease_histories.before(tx, server_round)

    def _quorum_at(
        self, current: Round, tasks: Sequence[OpenTask], quorum: int | None = None
    ) -> float | None:
        """Return the time at which the round reached its quorum of updates, in Unix seconds; None before that.

        Tasks handed out later do not change that time.
        """
        history, config = self._history(current.server_round), self._live_config.current.rounds
        given = sorted(task.given_at or 0.0 for task in tasks if history.counts(task))
        received = self._state.round_store.received_at(current.server_round)
        for number, at in enumerate(received, start=1):
            needed = config.quorum(bisect_right(given, at)) if quorum is None else quorum
            if number >= needed:
                return at
        return None

    def _log_quorum(self, server_round: int, tasks: Sequence[OpenTask], seconds: float) -> None:
        """Log once per round how many contributors are at work, excluding those whose reply is admitted."""
        if self._logged_quorum == server_round:
            return
        admitted = {row.message_id for row in self._state.round_store.admitted(server_round)}
        working = [task for task in tasks if not task.outcome and task.message_id not in admitted]
        if not working:
            return
        self._logged_quorum = server_round
        text = "round %d: quorum reached with %d updates of %s; %d still at work, waiting up to %.0f s for them%s"
        history = self._history(server_round)
        silent = sum(not history.of(task).is_awaited for task in working)
        note = f" ({silent} of them left their last {MAX_UNANSWERED} tasks unanswered)" if silent else ""
        ignored = sum(not history.counts(task) for task in working)
        if ignored:
            note += (
                f"; {ignored} of them do not count in the quorum, because too many of the last "
                f"{REMEMBERED_ROUNDS} rounds ended at the deadline without their answers"
            )
        handed_out = counted(len(tasks), "task")
        log.info(text, server_round, len(admitted), handed_out, len(working), max(0.0, seconds), note)

    def _is_abandoned(self, server_round: int, outcomes: Sequence[str]) -> bool:
        """Return True if all tasks failed, or were lost with nodes that did not return within a lease's duration."""
        if not outcomes or not set(outcomes) <= {"failed", "lost"}:
            self._abandoned = (0, 0.0)
            return False
        if self._abandoned[0] != server_round:
            self._abandoned = (server_round, self._state.clock.now())
        absent = self._state.clock.now() - self._abandoned[1]
        return "lost" not in outcomes or absent >= self._live_config.current.rounds.lease_seconds

    def _of_stage(self, server_round: int, stage: str) -> list[float]:
        begun = (secure_stages.c.server_round == secure_messages.c.server_round) & (
            secure_stages.c.stage == secure_messages.c.stage
        )
        query = (
            select(secure_messages.c.replied_at - secure_stages.c.started_at)
            .join(secure_stages, begun)
            .where(secure_messages.c.server_round.in_(_last(server_round)))
            .where(secure_messages.c.stage == stage, secure_messages.c.outcome == "replied")
        )
        if self._stage[:2] != (server_round, stage):
            with self._state.database.reading() as tx:
                found = [max(0.0, float(seconds)) for seconds in tx.scalars(query)]
            self._stage = (server_round, stage, found)
        return self._stage[2]


def _last(server_round: int) -> Select[tuple[int]]:
    """Select the last committed rounds before ``server_round``."""
    return (
        select(rounds.c.server_round)
        .where(rounds.c.state == COMMITTED, rounds.c.server_round < server_round)
        .order_by(rounds.c.server_round.desc())
        .limit(LEARNED_ROUNDS)
    )
