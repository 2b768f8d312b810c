"""Spans of a hub's rounds, as defined in ``gym_fed.core.tracing``."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.tracing import (
    TRACEPARENT,
    RoundTrace,
    begin_span,
    is_tracing,
    record_root,
    round_span,
    start_tracing,
    stop_tracing,
)
from gym_server.rounds.round_store import RoundStore
from gym_server.state import HubState
from gym_server.store.tables import rounds

_MAX_LEASES = 10_000


@contextmanager
def traced_hub(config: ServerConfig) -> Iterator[None]:
    """Export this process's spans during the block, if the config names a receiver."""
    endpoint = config.observe.otlp_endpoint
    if endpoint is not None:
        start_tracing("gym-hub", endpoint, "observe.otlp_endpoint")
    try:
        yield
    finally:
        stop_tracing()


def record_round(state: HubState, server_round: int) -> None:
    """Record the root span of an ended round, including the time before a restart of the hub."""
    if not is_tracing():
        return
    with state.database.reading() as tx:
        row = tx.execute(select(rounds).where(rounds.c.server_round == server_round)).one()
    to_wall = state.clock.wall() - state.clock.now()
    record_root(
        state.server, server_round, row.opened_at + to_wall, row.closed_at + to_wall, outcome=row.state
    )


def caller_of(context: Any) -> str:
    """Return the span context that a call's sender sent, not yet validated; empty if it sent none."""
    return str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")) if is_tracing() else ""


@asynccontextmanager
async def upload_span(server: str, round_store: RoundStore, context: Any) -> AsyncIterator[None]:
    """Record an upload as a span of the current round."""
    current = round_store.current() if is_tracing() else None
    if current is None:
        yield
        return
    with round_span("upload", server, current.server_round, caller_of(context)):
        yield


class LeaseSpans:
    """Records one span for each lease of a task, from its grant to the answer. Thread-safe.

    Leases without an answer produce no span; beyond a limit, the oldest leases are discarded.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._began: OrderedDict[str, float] = OrderedDict()

    def granted(self, message_id: str) -> None:
        """Record the time of a lease."""
        if not is_tracing():
            return
        with self._lock:
            self._began[message_id] = time.time()
            if len(self._began) > _MAX_LEASES:
                self._began.popitem(last=False)

    def answered(self, message_id: str, server_round: int, verdict: str) -> None:
        """Record the span of an answered lease."""
        with self._lock:
            start = self._began.pop(message_id, None)
        trace = RoundTrace.of(self._server, server_round)
        span = None if start is None else begin_span("lease", trace, "", {"verdict": verdict}, start)
        if span is not None:
            span.end()
