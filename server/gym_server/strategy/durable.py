"""DeltaSoup, the Flower strategy: durable rounds over any Flower grid.

``configure_train`` and ``aggregate_train`` follow Flower's contract and work on a stock SuperLink too. ``start`` adds
to Flower's own loop: rounds resume after a crash, replies are processed one at a time, contributors may join late, and
a bad reply never ends a round.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.system_errors import system_error
from gym_fed.core.tracing import round_span
from gym_server.evaluations.seeds import promise_seed
from gym_server.federation import Federation
from gym_server.observe.tracing import record_round
from gym_server.privacy import budget as privacy
from gym_server.privacy.secure_round import SecureAggregationRound
from gym_server.rewards.scores import ScoringStopped
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.merging import merge_round
from gym_server.rounds.payload import ByReference, Payloads
from gym_server.rounds.region import Region
from gym_server.rounds.round_store import ABORTED, COLLECTING, COMMITTED, MERGING, OPEN, Round
from gym_server.rounds.soups import discard
from gym_server.rounds.steering import is_coordinators
from gym_server.store.database import rerun
from gym_server.store.room import raise_if_full, wait_for_room
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.backoff import RoundBackoff, wait_while_paused
from gym_server.strategy.continuous_pace import pace_of
from gym_server.strategy.grid import HubGrid
from gym_server.strategy.reply_judge import STATE_ERRORS, ReplyJudge
from gym_server.strategy.tasks import new_task, refuse_stock_flower, task_content

log = logging.getLogger("gym_server")

POLL_SECONDS = 0.2

_HUBS_OWN = STATE_ERRORS | frozenset(
    {
        ErrorCode.CONFIG_INVALID,
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.DATA_INVALID,
        ErrorCode.MODEL_INVALID,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.MISSING_DEPENDENCY,
        ErrorCode.KEY_LOCKED,
    }
)
"""Errors of the coordinator's machine or files, after which no later round would succeed, so the hub stops."""


class DurableDeltaSoup(Strategy):
    """Flower strategy that merges signed deltas robustly, in rounds that survive a crash.

    Args:
        federation: The opened hub.
        payloads: How deltas are sent on the grid in use.
        should_stop: Called between polls; True ends ``start`` at the next safe point.
        on_round: Called at the end of each round, to display it.
    """

    def __init__(
        self,
        federation: Federation,
        payloads: Payloads | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_round: Callable[[Round], None] = lambda _: None,
    ) -> None:
        self._state, self._live_config = federation.state, federation.live_config
        self._rounds, self._queue = federation.round_store, federation.queue
        self._steering = federation.steering
        self._accounts, self._keys = federation.accounts, federation.keys
        self._max_update_bytes = federation.max_update_bytes
        self._should_stop, self._on_round = should_stop, on_round
        self._payloads = payloads or ByReference()
        if not self._payloads.by_reference:
            refuse_stock_flower(federation.config)
        self._model: HubModel | None = None
        self._replies = ReplyJudge(federation, self._payloads)
        self._region = Region.of(self._state, self._live_config, self._steering)
        self._pace = pace_of(self._state, self._live_config, federation.lease_histories)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the round's task for every account that does not have it; ``arrays`` and ``config`` are unused."""
        current = self._collecting(server_round)
        tasks = self._rounds.tasks(server_round)
        there = list(grid.get_node_ids())
        accounts = self._queue.accounts_of([*tasks, *there])
        lost = {node for node, (_, outcome) in tasks.items() if outcome == "lost"}
        served = {accounts.get(node) for node in tasks if node not in lost} - {None}
        resting = self._pace.resting(server_round) if lost else set()
        content: RecordDict | None = None
        for node_id in there:
            is_free = node_id not in tasks or node_id in lost
            who = accounts.get(node_id)
            if is_free and who not in served and (who or str(node_id)) not in resting:
                content = content or task_content(current, self._payloads)
                yield Message(
                    content=content,
                    message_type=MessageType.TRAIN,
                    dst_node_id=node_id,
                    group_id=str(server_round),
                    ttl=self._pace.task_seconds(current),
                )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process the replies, then merge, gate and commit (or abort) the round.

        Returns:
            None for the arrays, since versions are stored as objects, and the metrics of the new version (None after an
            abort).
        """
        self._take(server_round, replies)
        ended = self._finish(self._rounds.require(server_round))
        version = self._rounds.head()
        if ended.state != COMMITTED:
            return None, None
        return None, MetricRecord({"version": version.height})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages, since the coordinator's gate evaluates versions."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, since no evaluation was requested."""
        return None

    def summary(self) -> None:
        """Log the recipe."""
        log.info("DeltaSoup: %s, %s", self._config.soup.aggregator, self._pace.summary())

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run rounds until ``num_rounds`` (by default the config's) have been committed, across restarts.

        After a round that was aborted or ended by an internal error, it waits and starts another one
        (``RoundBackoff``).

        Raises:
            GymError: If a later round could not succeed either, for example because of corrupt state.
            StoreUnavailable: If the database or the object store is unreachable; `gym-server run` waits and restarts.
        """
        self.summary()
        wanted = num_rounds or self._config.rounds.num_rounds
        backoff = RoundBackoff(self._state, self._live_config, self._queue, grid, self._should_stop)
        while not self._should_stop():
            try:
                if not self._advance(grid, wanted, backoff):
                    break
            except (OSError, OperationalError) as error:
                # The disk is full or the database is unreachable; the round resumes from its stored state afterwards.
                log.exception("no round can continue now")
                known = system_error(error)
                what = f"{type(error).__name__}: {error}" if known is None else f"{known.code.value}: {known}"
                backoff.hold(f"this machine: {what}")
        return Result()

    def _advance(self, grid: Grid, wanted: int, backoff: RoundBackoff) -> bool:
        """Run one round, and wait after a failed one; return False if there is nothing left to do."""
        region, made = self._region, self._rounds.num_committed
        is_done = made() >= wanted if region is None else not region.may_begin(self._should_stop)
        current, is_spent = self._rounds.current(), privacy.is_spent(self._config, self._state.database)
        if is_done or is_spent:
            if not is_done and current is not None and not current.is_over:
                self._rounds.abort(current.server_round, privacy.SPENT)
            if current is not None and (current.is_over or not is_done):
                self._queue.close_group(
                    str(current.server_round)
                )  # no further round could take over open tasks
            return False
        if current is None or current.is_over:
            if self._steering.paused() is not None:
                wait_while_paused(self._live_config, self._steering, self._should_stop)
                return True
            wait_for_room(self._state, self._config, self._should_stop)
            if self._should_stop():
                return False
            self._live_config.follow()
            self._state.clock.catch_up()
            current = self._rounds.open_next()
        try:
            ended = self._run_round(current, grid)
        except (OSError, SQLAlchemyError, StoreUnavailable):
            raise
        except Exception as error:  # noqa: BLE001 (an error in one round must not stop the hub)
            ended = self._abort_for(current.server_round, error)
        if ended is None:
            return False
        record_round(self._state, ended.server_round)
        if ended.state == COMMITTED:
            backoff.succeeded()
        elif not is_coordinators(ended.reason):
            backoff.failed(ended.server_round, ended.reason)
        return True

    def _abort_for(self, server_round: int, error: Exception) -> Round:
        """End a round after an internal error; re-raise the error if no later round could succeed."""
        raise_if_full(error)
        if isinstance(error, GymError) and error.code in _HUBS_OWN:
            raise error
        current = self._rounds.require(server_round)
        if current.state == ABORTED:  # the coordinator ended it in the meantime
            return self._finish(current)
        log.error("round %d failed", server_round, exc_info=error)
        if not current.is_over:
            what = error.code.value if isinstance(error, GymError) else type(error).__name__
            self._rounds.abort(server_round, f"an error in the hub ({what}); its log has the traceback")
        if not self._pace.keeps_tasks:
            self._queue.close_group(str(server_round))
        return self._rounds.require(server_round)

    def _run_round(self, current: Round, grid: Grid) -> Round | None:
        """Run a round from its current state to its end; return None if the hub was stopped."""
        server_round = current.server_round
        if self._config.draws_by_seed:
            self._promise_seed(server_round)
        failpoint(f"state-{current.state}")
        while current.state in (OPEN, COLLECTING):
            if self._should_stop():
                return None
            if current.state == OPEN:
                if self._steering.paused() is not None or not list(grid.get_node_ids()):
                    time.sleep(POLL_SECONDS)
                    self._live_config.follow()
                    current = self._rounds.require(server_round)
                    continue
                self._collecting(server_round)
                failpoint("state-collecting")
            if self._config.secure_aggregation is not None:
                break
            self._push(server_round, grid)
            self._pull(server_round, grid)
            if self._pace.is_complete(self._rounds.require(server_round)):
                break
            time.sleep(POLL_SECONDS)
            current = self._rounds.require(server_round)
        current = self._rounds.require(server_round)
        should_end = functools.partial(self._should_end, server_round)
        if self._config.secure_aggregation is not None and not current.is_over:
            content = functools.partial(task_content, current, self._payloads)
            secure = SecureAggregationRound(
                self._state,
                self._live_config,
                self._queue,
                self._keys,
                self._accounts,
                self._pace,
                grid,
                current,
                content,
                self._take,
                should_end,
            )
            if not secure.run() and self._should_stop():
                return None
        try:
            return self._finish(self._rounds.require(server_round), should_end)
        except ScoringStopped:
            log.info("round %d: stopped while scoring; it continues from the merge", server_round)
            return None

    def _should_end(self, server_round: int) -> bool:
        """Return True if the hub is stopping or the coordinator has ended the round."""
        return self._should_stop() or self._rounds.require(server_round).state == ABORTED

    @rerun
    def _promise_seed(self, server_round: int) -> None:
        """Commit to a seed if the round was opened before the config had evaluations or audits."""
        with self._state.database.transaction() as tx:
            promise_seed(tx, self._state.ledger, server_round)

    def _push(self, server_round: int, grid: Grid) -> None:
        new = list(self.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid))
        for messages in [new] if isinstance(grid, HubGrid) and new else [[message] for message in new]:
            ids = grid.push_messages(messages)
            node_ids = [message.metadata.dst_node_id for message in messages]
            self._rounds.record_tasks(server_round, dict(zip(node_ids, ids, strict=False)))

    def _pull(self, server_round: int, grid: Grid) -> None:
        waiting = [message for message, outcome in self._rounds.tasks(server_round).values() if not outcome]
        if isinstance(grid, HubGrid):
            self._take(server_round, grid.replies(waiting))
            return
        # Replies are pulled one at a time, since they contain the deltas and a SuperLink sends each only once.
        for message_id in waiting:
            self._take(server_round, grid.pull_messages([message_id]))

    def _take(self, server_round: int, replies: Iterable[Message]) -> None:
        """Judge replies and record their outcomes, even if a failure of this machine interrupts the loop."""
        outcomes: dict[str, str] = {}
        try:
            for reply in replies:
                outcome = self._replies.outcome(server_round, reply)
                outcomes[reply.metadata.reply_to_message_id] = outcome
        finally:
            if outcomes:
                self._rounds.record_outcomes(server_round, outcomes)

    def _finish(self, current: Round, should_end: Callable[[], bool] = lambda: False) -> Round:
        server_round = current.server_round
        if current.state == COLLECTING:
            if not self._pace.has_quorum(current):
                self._rounds.abort(server_round, self._pace.shortfall(current))
            else:
                current = self._rounds.start_merging(server_round)
                failpoint("state-merging")
        late = 0 if self._pace.keeps_tasks else self._queue.close_group(str(server_round))
        if late:
            log.info(
                "round %d ends; contributors still at work: %d (their updates are late)", server_round, late
            )
        if current.state == MERGING:
            self._merge(current, should_end)
        ended = self._rounds.require(server_round)
        log.info("round %d %s%s", server_round, ended.state, f": {ended.reason}" if ended.reason else "")
        self._on_round(ended)
        return ended

    def _merge(self, current: Round, should_end: Callable[[], bool]) -> None:
        """Merge a round, and discard the result if the coordinator has ended the round in the meantime."""
        try:
            with (
                round_span("merge", self._state.server, current.server_round),
                self._hub_model().freed_afterwards() as model,
            ):
                merge_round(self._state, self._config, self._keys, model, current, should_end)
        except Exception:
            if self._rounds.require(current.server_round).state != ABORTED:
                raise
            discard(self._state.folder, current.server_round)

    @property
    def _config(self) -> ServerConfig:
        return self._live_config.current

    def _collecting(self, server_round: int) -> Round:
        """Return the round in state ``collecting``, moving it there from ``open`` if necessary."""
        current = self._rounds.current()
        if current is None or current.server_round != server_round:
            if privacy.is_spent(self._config, self._state.database):
                raise GymError(
                    ErrorCode.ROUND_ABORTED,
                    privacy.end_of_run(self._config, self._state.database, self._rounds),
                )
            current = self._rounds.open_next()
        if current.state == OPEN:
            self._live_config.follow()
            current = self._rounds.start_collecting(
                server_round, new_task(self._state, self._config, self._max_update_bytes, server_round)
            )
        return current

    def _hub_model(self) -> HubModel:
        if self._model is None:
            self._model = HubModel.of(self._state, self._config)
        self._model.follow(self._rounds.soups())
        return self._model


DeltaSoup = DurableDeltaSoup
"""Public name of the strategy: ``gym_server.strategy.DeltaSoup``."""
