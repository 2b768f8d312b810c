"""The end of a round's collection: after the quorum it waits as long as rounds usually take, not for the slowest.

A round that waits for everybody is as slow as the one contributor that sends heartbeats and nothing else. So those who
are still at work when the quorum is there get a grace period, learned from how long updates took in the last rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, func, select

from gym_fed.config.hub.sections import RoundsConfig
from gym_fed.text import counted
from gym_server.federation import Federation
from gym_server.rounds.round_store import COMMITTED, Round
from gym_server.store.tables import messages, rounds, secure_messages, secure_stages, updates

log = logging.getLogger("gym_server")

LEARNED_ROUNDS = 10
QUANTILE = 0.9
FIRST_SHARE = 0.25
"""Grace as a share of the deadline, while too little is known."""
_MIN_KNOWN = 3


def grace_ends(
    config: RoundsConfig, known: Sequence[float], started_at: float, quorum_at: float, deadline_seconds: float
) -> float:
    """When a round, or a stage of one, continues without those who have not answered.

    Args:
        config: Factor and bounds.
        known: Seconds from start to answer in earlier rounds.
        started_at: Unix time.
        quorum_at: Unix time at which there were enough answers.
        deadline_seconds: What the round or stage may take.
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
    """When a hub's rounds are complete. What earlier rounds took is read once a round."""

    def __init__(self, fed: Federation) -> None:
        self._fed = fed
        self._known: dict[tuple[int, str], list[float]] = {}
        self._abandoned: tuple[int, float] = (0, 0.0)
        """Round whose tasks are all lost or failed, and since when."""
        self._logged_quorum = 0

    def is_complete(self, current: Round) -> bool:
        """Whether a collecting round waits for nobody any more.

        All have answered, the grace period or the deadline is over, or nobody is left.
        """
        assert current.spec is not None
        server_round, now = current.server_round, self._fed.clock.now()
        if now >= current.spec.deadline_seconds:
            return True
        outcomes = self._outcomes(server_round)
        ends = self.round_ends(current, self._fed.config.rounds.min_contributors)
        if ends is None:
            return self._is_abandoned(server_round, outcomes)
        self._log_quorum(server_round, ends - now)
        return "" not in outcomes or now >= ends

    def shortfall(self, current: Round, admitted: int) -> str:
        """Why a round with only ``admitted`` updates, below its quorum, is over."""
        assert current.spec is not None
        needed = self._fed.config.rounds.min_contributors
        if self._fed.clock.now() >= current.spec.deadline_seconds:
            return f"{admitted} of {counted(needed, 'update')} at the deadline"
        outcomes = self._outcomes(current.server_round)
        failed, lost = outcomes.count("failed"), outcomes.count("lost")
        left = f"{counted(failed, 'contributor')} failed, {lost} went away, nobody else is there"
        return f"{admitted} of {counted(needed, 'update')}: {left}"

    def round_ends(self, current: Round, quorum: int) -> float | None:
        """When a collecting round is merged at the latest; None before ``quorum`` updates are admitted."""
        assert current.spec is not None
        rows = self._fed.round_store.admitted(current.server_round)
        if len(rows) < quorum:
            return None
        quorum_at = sorted(row.received_at for row in rows)[quorum - 1]
        config = self._fed.config.rounds
        started_at = min(current.spec.deadline_seconds - config.deadline_seconds, quorum_at)
        known = self._of_updates(current.server_round)
        return grace_ends(config, known, started_at, quorum_at, current.spec.deadline_seconds - started_at)

    def stage_ends(self, server_round: int, stage: str, started_at: float, quorum: int) -> float | None:
        """As ``round_ends`` for a stage of secure aggregation that has ``stage_seconds``; members' answers count."""
        secure = self._fed.config.secure_aggregation
        assert secure is not None
        where = (secure_messages.c.server_round == server_round) & (secure_messages.c.stage == stage)
        with self._fed.database.reading() as tx:
            replied = tx.scalars(
                select(secure_messages.c.replied_at)
                .where(where, secure_messages.c.outcome == "replied")
                .order_by(secure_messages.c.replied_at)
            ).all()
        if len(replied) < quorum:
            return None
        known = self._of_stage(server_round, stage)
        config, quorum_at = self._fed.config.rounds, replied[quorum - 1]
        return grace_ends(
            config, known, started_at, float(quorum_at or self._fed.clock.now()), secure.stage_seconds
        )

    def _outcomes(self, server_round: int) -> list[str]:
        return [outcome for _, outcome in self._fed.round_store.tasks(server_round).values()]

    def _log_quorum(self, server_round: int, seconds: float) -> None:
        """Log once a round who is waited for beyond the quorum; a reply that is admitted and not yet taken is not."""
        tasks = self._fed.round_store.tasks(server_round).values()
        admitted = {row.message_id for row in self._fed.round_store.admitted(server_round)}
        others = len({message_id for message_id, outcome in tasks if not outcome} - admitted)
        if others and self._logged_quorum != server_round:
            self._logged_quorum = server_round
            who = "1 other is" if others == 1 else f"{others} others are"
            text = "round %d: quorum; %s waited for, %.0f s at most"
            log.info(text, server_round, who, max(0.0, seconds))

    def _is_abandoned(self, server_round: int, outcomes: Sequence[str]) -> bool:
        """Whether everybody who was given the task failed, or went away and did not come back within a lease."""
        if not outcomes or not set(outcomes) <= {"failed", "lost"}:
            self._abandoned = (0, 0.0)
            return False
        if self._abandoned[0] != server_round:
            self._abandoned = (server_round, self._fed.clock.now())
        absent = self._fed.clock.now() - self._abandoned[1]
        return "lost" not in outcomes or absent >= self._fed.config.rounds.lease_seconds

    def _of_updates(self, server_round: int) -> list[float]:
        """Seconds from a task to its update, in the last committed rounds; from the round's start without the task."""
        began = func.coalesce(
            messages.c.created_at, rounds.c.deadline - self._fed.config.rounds.deadline_seconds
        )
        query = (
            select(updates.c.received_at - began)
            .join(rounds, rounds.c.server_round == updates.c.server_round)
            .outerjoin(messages, messages.c.message_id == updates.c.message_id)
            .where(updates.c.server_round.in_(_last(server_round)), updates.c.verdict != "refused")
        )
        return self._learned((server_round, ""), query)

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
        return self._learned((server_round, stage), query)

    def _learned(self, key: tuple[int, str], query: Select[Any]) -> list[float]:
        if key not in self._known:
            with self._fed.database.reading() as tx:
                self._known[key] = [max(0.0, float(seconds)) for seconds in tx.scalars(query)]
        return self._known[key]


def _last(server_round: int) -> Select[tuple[int]]:
    """The last committed rounds before one."""
    return (
        select(rounds.c.server_round)
        .where(rounds.c.state == COMMITTED, rounds.c.server_round < server_round)
        .order_by(rounds.c.server_round.desc())
        .limit(LEARNED_ROUNDS)
    )
