"""Backoff after failed rounds: the hub waits longer after each failure, and keeps serving.

A hub survives aborted rounds, for example when it stays below quorum overnight, or when one contributor answers every
task with an error. A newly connected contributor ends the wait. A contributor that took part in the failed round does
not, so that nobody can keep the hub busy by reconnecting.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from gym_fed.core.text import counted
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.steering import Steering
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.tables import settings

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("gym_server")

_SETTING = "rounds_paused"
_POLL_SECONDS = 0.2
_MAX_REASON = 300


class RoundBackoff:
    """Counts consecutive failed rounds, and waits after each.

    Args:
        state: The hub's state.
        live_config: The current config.
        queue: The message queue.
        grid: Grid that reports the connected nodes.
        should_stop: Called between polls; True ends the wait.
    """

    def __init__(
        self,
        state: HubState,
        live_config: LiveConfig,
        queue: MessageQueue,
        grid: Grid,
        should_stop: Callable[[], bool],
    ) -> None:
        self._state, self._live_config = state, live_config
        self._queue = queue
        self._grid, self._should_stop = grid, should_stop
        self._failures = 0
        self._seen: set[str] = set()
        self._spoilt: set[str] = set()
        state.database.set(_SETTING, "")

    def succeeded(self) -> None:
        """Reset the count after a committed round."""
        self._failures = 0
        self._seen.clear()
        self._spoilt.clear()

    def failed(self, server_round: int, reason: str) -> None:
        """Wait after a round that did not create a version."""
        self._failures += 1
        tasks = self._state.round_store.tasks(server_round)
        names = self._names(tasks)
        self._spoilt |= {names[node] for node, (_, outcome) in tasks.items() if outcome in ("failed", "lost")}
        self._seen |= set(names.values())
        there = self._there()
        self._seen |= there
        seconds = self._seconds()
        text = (
            "%s in a row made no version; the next one begins in %.0f s, or when a contributor connects: %s"
        )
        log.warning(text, counted(self._failures, "round"), seconds, reason[:_MAX_REASON])
        self._say(self._state.clock.now() + seconds, reason)
        self._wait(time.monotonic() + seconds, there)
        self._state.database.set(_SETTING, "")

    def hold(self, reason: str) -> None:
        """Wait after a local failure, such as an unreachable database; new contributors do not end the wait."""
        self._failures += 1
        seconds = self._seconds()
        log.error("the next attempt is in %.0f s: %s", seconds, reason[:_MAX_REASON])
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._should_stop():
            time.sleep(_POLL_SECONDS)

    def _seconds(self) -> float:
        config = self._live_config.current.rounds
        return min(config.backoff_seconds * 2.0 ** min(self._failures - 1, 30), config.backoff_max_seconds)

    def _wait(self, end: float, there: set[str]) -> None:
        while time.monotonic() < end and not self._should_stop():
            if paused(self._state.database) is None:  # the coordinator ended the wait with ``end_wait``
                return
            now = self._there()
            if now - self._seen or (now - there) - self._spoilt:
                return
            there &= now  # a node that disconnects and returns counts as new
            time.sleep(_POLL_SECONDS)

    def _there(self) -> set[str]:
        return set(self._names(self._grid.get_node_ids()).values())

    def _names(self, nodes: Any) -> dict[int, str]:
        """Return the accounts of nodes, by node id; on a stock Flower grid, the ids themselves."""
        found = [int(node) for node in nodes]
        known = self._queue.accounts_of(found)
        return {node: known.get(node, str(node)) for node in found}

    def _say(self, until: float, reason: str) -> None:
        paused = {"until": until, "failures": self._failures, "reason": reason[:_MAX_REASON]}
        self._state.database.set(_SETTING, json.dumps(paused))


def end_wait(database: Database) -> bool:
    """End a hub's wait, in this process or another; return False if it is not waiting."""
    if paused(database) is None:
        return False
    database.set(_SETTING, "")
    return True


def paused(database: Database) -> dict[str, Any] | None:
    """Return a hub's current wait: its end, the number of failed rounds, and the last reason; None if there is none."""
    with database.reading() as tx:
        found = tx.scalar(select(settings.c.value).where(settings.c.key == _SETTING))
    return json.loads(found) if found else None


def wait_while_paused(live_config: LiveConfig, steering: Steering, should_stop: Callable[[], bool]) -> None:
    """Return when rounds may begin again, or when ``should_stop`` returns True."""
    pause = steering.paused()
    if pause is None:
        return
    log.info("%s; no round begins until gym-server resume", pause)
    while pause is not None and not should_stop():
        time.sleep(_POLL_SECONDS)
        live_config.follow()
        pause = steering.paused()
    if pause is None:
        log.info("the pause is over")
