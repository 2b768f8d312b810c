"""A round of secure aggregation, which has five stages: advertise, share, train, confirm and unmask.

The first three stages run in the round's state ``collecting``. The freeze to ``merging`` fixes the survivors, and the
last two stages follow. A stage ends at its deadline, or earlier once enough members and all reachable ones have
answered. A node that reconnects in time gets the request again; a later one misses the round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import cached_property

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from sqlalchemy import select

from gym_fed.config.hub.server import needed_survivors, wanted_participants
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted
from gym_fed.privacy.secure_aggregation.keys import share_commitment
from gym_fed.privacy.secure_aggregation.messages import (
    ACTIONS,
    ADVERTISE,
    CONFIRM,
    RECORD,
    SHARE,
    TRAIN,
    UNMASK,
    Confirmation,
    Masking,
    Revealed,
    SealedShares,
    SignedAdvert,
    Survivors,
    Unmasking,
    check_tasks,
    parse,
    task_digest,
)
from gym_server.accounts.accounts import Accounts
from gym_server.accounts.keys import Keys
from gym_server.privacy.secure_stages import Stage, Stages
from gym_server.privacy.secure_unmask import ids, recover
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import MERGING, Round
from gym_server.state import HubState
from gym_server.store.tables import nodes, updates
from gym_server.strategy.grid import LOST
from gym_server.strategy.pace import Pace

log = logging.getLogger("gym_server")
POLL_SECONDS = 0.2


class SecureAggregationRound:
    """Runs one round from ``collecting`` until its sum can be unmasked or it is aborted.

    Args:
        pace: Decides when the stages end.
        grid: Sends messages to the contributors.
        current: The round, with its task.
        content: Function that returns the task's records, to which each stage adds its own messages.
        take: Function that judges replies to the training task.
        should_stop: Called between polls; True stops the run.
    """

    def __init__(
        self,
        state: HubState,
        live_config: LiveConfig,
        queue: MessageQueue,
        keys: Keys,
        accounts: Accounts,
        pace: Pace,
        grid: Grid,
        current: Round,
        content: Callable[[], RecordDict],
        take: Callable[[int, Iterable[Message]], None],
        should_stop: Callable[[], bool],
    ) -> None:
        assert live_config.current.secure_aggregation is not None
        assert current.spec is not None
        self._state, self._live_config = state, live_config
        self._queue, self._keys = queue, keys
        self._accounts = accounts
        self._grid, self._spec = grid, current.spec
        self._number = current.server_round
        self._content, self._take, self._should_stop = content, take, should_stop
        self._config = live_config.current.secure_aggregation
        self._threshold = (current.spec.secure_aggregation or self._config).threshold
        self._stages = Stages(state.database, state.clock.now)
        self._objectors: set[int] = set()
        self._pace = pace

    def run(self) -> bool:
        """Continue from the current stage; return False if stopped before the end."""
        while not self._should_stop():
            stage = self._stages.current(self._number)
            self._push(stage)
            self._pull(stage)
            if self._ended(stage):
                return True
            if self._stages.current(self._number) == stage:
                time.sleep(POLL_SECONDS)
        return False

    def _push(self, stage: Stage) -> None:
        tasks, connected = self._tasks(stage), set(self._grid.get_node_ids())
        accounts = self._queue.accounts_of({*tasks, *connected})
        served = {accounts.get(node) for node, (_, outcome) in tasks.items() if outcome != "lost"} - {None}
        for node in sorted(connected) if stage.members is None else stage.members:
            known = tasks.get(node)
            if known is None and accounts.get(node) in served:
                continue  # an account is one participant, regardless of which of its nodes is connected
            if known is None or (known[1] == "lost" and node in connected):
                for message_id in self._grid.push_messages([self._message(stage, node)]):
                    if stage.name == TRAIN:
                        self._state.round_store.record_tasks(self._number, {node: message_id})
                    else:
                        self._stages.record_task(self._number, stage.name, node, message_id)

    def _message(self, stage: Stage, node: int) -> Message:
        content = self._content()
        if stage.name != TRAIN:
            del content["soups"]
        record = self._record_for(stage, node)
        if record is not None:
            content[RECORD] = ConfigRecord({"json": record.model_dump_json()})
        kind = MessageType.TRAIN if stage.name == TRAIN else f"{MessageType.QUERY}.{ACTIONS[stage.name]}"
        return Message(
            content=content,
            message_type=kind,
            dst_node_id=node,
            group_id=str(self._number),
            ttl=max(60.0, self._deadline(stage) - self._state.clock.now()),
        )

    def _record_for(self, stage: Stage, node: int) -> StrictModel | None:
        if stage.name == SHARE:
            return self._stages.participants(self._number)
        if stage.name == TRAIN:
            own = self._stages.adverts(self._number)[node].advert.contributor
            dealt = {dealer: shares for dealer, shares in self._dealt.items() if dealer != own}
            return Masking(
                sealed={dealer: shares.sealed[own] for dealer, shares in dealt.items()},
                commitments={dealer: shares.commitments[own] for dealer, shares in dealt.items()},
            )
        if stage.name == CONFIRM:
            return Survivors(survivors=list(ids(self._stages, self._number, CONFIRM)))
        if stage.name == UNMASK:
            adverts_of = self._stages.adverts(self._number, UNMASK)
            replies = self._stages.replies(self._number, CONFIRM, Confirmation)
            return Unmasking(
                survivors=list(ids(self._stages, self._number, UNMASK)),
                confirmations={adverts_of[node].advert.contributor: one for node, one in replies.items()},
            )
        return None

    def _pull(self, stage: Stage) -> None:
        for node, (message_id, outcome) in self._tasks(stage).items():
            if outcome != "":
                continue
            for reply in self._grid.pull_messages([message_id]):
                if reply.has_error() and reply.error.code == ErrorCode.TASKS_DIFFER.exit_code:
                    self._objectors.add(node)
                if stage.name == TRAIN:
                    self._take(self._number, [reply])
                else:
                    self._record_reply(stage, node, reply)

    def _record_reply(self, stage: Stage, node: int, reply: Message) -> None:
        """Judge one node's reply in a stage; invalid content is rejected without raising."""
        outcome, text = "replied", None
        if reply.has_error():
            outcome = "lost" if reply.error.code == LOST else "failed"
            who = self._queue.name_of(node)
            log.info("round %d: %s: %s: %s", self._number, stage.name, who, reply.error.reason)
        else:
            try:
                record = reply.content.get(RECORD)
                checked = self._checked(
                    stage, node, record.get("json") if isinstance(record, ConfigRecord) else None
                )
                text = checked.model_dump_json()
            except GymError as error:
                outcome = "failed"
                who = self._queue.name_of(node)
                log.info("round %d: %s: %s refused: %s", self._number, stage.name, who, error)
        self._stages.record_outcome(self._number, stage.name, node, outcome, text)

    def _checked(self, stage: Stage, node: int, text: object) -> StrictModel:
        if stage.name == ADVERTISE:
            signed = parse(SignedAdvert, text)
            signed.verify(self._spec.server, self._number, self._threshold)
            check_tasks([signed], task_digest(self._spec))
            self._check_owner(node, signed)
            return signed
        advert = self._stages.adverts(self._number)[node].advert
        if stage.name == SHARE:
            shares = parse(SealedShares, text)
            shares.verify(advert, self._stages.participants(self._number))
            return shares
        if stage.name == CONFIRM:
            confirmation = parse(Confirmation, text)
            survivors = list(ids(self._stages, self._number, CONFIRM))
            confirmation.verify(advert, survivors, self._stages.participants(self._number))
            return confirmation
        revealed = parse(Revealed, text)
        self._check_revealed(advert.contributor, revealed)
        return revealed

    def _check_revealed(self, holder: str, revealed: Revealed) -> None:
        """Check that an answer has all required shares, unchanged since they were dealt."""
        survivors = {*ids(self._stages, self._number, UNMASK)}
        self._same({*revealed.seeds}, survivors)
        self._same({*revealed.mask_keys}, {*self._dealt} - survivors)
        for secret, shares in (("seed", revealed.seeds), ("mask", revealed.mask_keys)):
            for dealer, share in shares.items():
                dealt = self._dealt[dealer].commitments[holder][secret == "mask"]
                if share_commitment(bytes.fromhex(share), secret, dealer, holder) != dealt:
                    raise GymError(
                        ErrorCode.UPDATE_REFUSED, f"{holder} reveals a share that {dealer} did not deal"
                    )

    @cached_property
    def _dealt(self) -> dict[str, SealedShares]:
        """Return the shares dealt by each masking member, by id; complete once the share stage is over."""
        adverts = self._stages.adverts(self._number, TRAIN)
        shares = self._stages.replies(self._number, SHARE, SealedShares)
        return {signed.advert.contributor: shares[node] for node, signed in adverts.items()}

    def _check_owner(self, node: int, signed: SignedAdvert) -> None:
        with self._state.database.reading() as tx:
            contributor = tx.scalar(select(nodes.c.contributor).where(nodes.c.node_id == node))
        if self._accounts.public_key(str(contributor)).hex() != signed.advert.public_key:
            raise GymError(ErrorCode.SIGNATURE_INVALID, f"the keys are not signed by {contributor}")
        others = self._stages.adverts(self._number)
        if any(a.advert.public_key == signed.advert.public_key for n, a in others.items() if n != node):
            raise GymError(ErrorCode.UPDATE_REFUSED, f"{contributor} already takes part from another machine")

    @staticmethod
    def _same(found: set[str], wanted: set[str]) -> None:
        if found != wanted:
            raise GymError(
                ErrorCode.UPDATE_REFUSED, f"got shares for {sorted(found)}, expected {sorted(wanted)}"
            )

    def _tasks(self, stage: Stage) -> dict[int, tuple[str, str]]:
        if stage.name == TRAIN:
            return self._state.round_store.tasks(self._number)
        return self._stages.tasks(self._number, stage.name)

    def _deadline(self, stage: Stage) -> float:
        if stage.name == TRAIN:
            return self._spec.deadline_seconds
        return stage.started_at + self._config.stage_seconds

    def _ended(self, stage: Stage) -> bool:
        """Begin the next stage if this one is over; return True after the last stage or an abort."""
        if stage.name == UNMASK:
            return self._unmasked(stage)
        if stage.name == TRAIN and self._state.round_store.require(self._number).state == MERGING:
            return self._freeze()
        if stage.name == CONFIRM:
            return self._confirmed(stage)
        tasks = self._tasks(stage)
        replied = [node for node, (_, outcome) in tasks.items() if outcome == "replied"]
        if stage.name == TRAIN:
            return self._trained(stage, tasks)
        if stage.name == ADVERTISE:
            maximum = 2 * self._threshold - 1
            if len(replied) > maximum:
                log.info("round %d: %d surplus contributors wait", self._number, len(replied) - maximum)
            replied, wanted = replied[:maximum], wanted_participants(self._live_config.current)
            if self._state.clock.now() >= self._spec.deadline_seconds and len(replied) < needed_survivors(
                self._live_config.current
            ):
                return self._abort(f"only {counted(len(replied), 'contributor')} had begun by the deadline")
            if tasks and all(outcome == "failed" for _, outcome in tasks.values()):
                return self._abort(f"all {counted(len(tasks), 'contributor')} failed to begin")
            if len(replied) < needed_survivors(self._live_config.current):
                return False  # the stage begins once enough members have returned
        else:
            wanted = needed_survivors(self._live_config.current)
        outstanding = any(outcome == "" for _, outcome in tasks.values())
        over = stage.name != ADVERTISE and self._is_over(stage)
        over = over or self._state.clock.now() >= self._stage_ends(stage, wanted)
        if not over and self._is_out_of_reach(stage, tasks):
            return self._abort(
                f"too few of {counted(len(stage.members or []), 'contributor')} are left to share their keys"
            )
        if not over and (outstanding or len(replied) < wanted):
            return False
        if len(replied) < needed_survivors(self._live_config.current):
            return self._abort(f"only {counted(len(replied), 'contributor')} shared their keys")
        following = {ADVERTISE: SHARE, SHARE: TRAIN}[stage.name]
        self._stages.begin(self._number, following, replied)
        failpoint(f"secure-{following}")
        return False

    def _trained(self, stage: Stage, tasks: dict[int, tuple[str, str]]) -> bool:
        admitted = len(self._state.round_store.admitted(self._number))
        enough, over = admitted >= needed_survivors(self._live_config.current), self._is_over(stage)
        if enough and not over:
            ends = self._pace.round_ends(
                self._state.round_store.require(self._number), needed_survivors(self._live_config.current)
            )
            over = ends is not None and self._state.clock.now() >= ends
        if not over and not enough and self._is_out_of_reach(stage, tasks):
            return self._abort(
                f"only {counted(admitted, 'masked update')}, and too few contributors are left to send more"
            )
        if not over and (not enough or any(outcome == "" for _, outcome in tasks.values())):
            return False
        if not enough:
            late = " at the deadline" if self._state.clock.now() >= self._deadline(stage) else ""
            return self._abort(f"only {counted(admitted, 'masked update')}{late}")
        self._state.round_store.start_merging(self._number)
        self._queue.close(message_id for message_id, _ in tasks.values())
        failpoint("state-merging")
        return self._freeze()

    def _is_out_of_reach(self, stage: Stage, tasks: dict[int, tuple[str, str]]) -> bool:
        """Return True if more members have failed than may be missing."""
        if stage.members is None:
            return False
        failed = sum(outcome == "failed" for _, outcome in tasks.values())
        return len(stage.members) - failed < needed_survivors(self._live_config.current)

    def _stage_ends(self, stage: Stage, wanted: int) -> float:
        """Return the stage's deadline, or an earlier one from usual durations once ``wanted`` members have answered."""
        ends = self._pace.stage_ends(self._number, stage.name, stage.started_at, wanted)
        return self._deadline(stage) if ends is None else min(ends, self._deadline(stage))

    def _freeze(self) -> bool:
        """Start unmasking the sum of the frozen list of updates, except those signed by a key revoked since."""
        with self._state.database.reading() as tx:
            chosen = updates.c.update_id.in_(self._state.round_store.require(self._number).merging)
            rows = tx.execute(select(updates).where(chosen)).all()
        revoked = self._keys.signed_by_revoked(rows)
        messages = {row.message_id for row in rows if row.update_id not in revoked}
        tasks = self._state.round_store.tasks(self._number)
        survivors = [node for node, (message_id, _) in tasks.items() if message_id in messages]
        if len(survivors) < needed_survivors(self._live_config.current):
            return self._abort(f"only {counted(len(survivors), 'masked update')} with unrevoked keys")
        self._stages.begin(self._number, CONFIRM, survivors)
        failpoint(f"secure-{CONFIRM}")
        return False

    def _confirmed(self, stage: Stage) -> bool:
        confirmed = len(self._stages.replies(self._number, CONFIRM, Confirmation))
        over = self._is_over(stage)
        if confirmed < self._threshold:
            return self._abort(f"only {counted(confirmed, 'contributor')} confirmed") if over else False
        waits = self._state.clock.now() < self._stage_ends(stage, self._threshold)
        if confirmed < len(stage.members or []) and waits and not over and self._is_asking(stage):
            return False
        self._stages.begin(self._number, UNMASK, stage.members)
        failpoint(f"secure-{UNMASK}")
        return False

    def _is_asking(self, stage: Stage) -> bool:
        """Return True if an answer is pending."""
        return any(outcome == "" for _, outcome in self._tasks(stage).values())

    def _is_over(self, stage: Stage) -> bool:
        """Return True if no more answers can arrive."""
        tasks = self._tasks(stage)
        waiting = any(outcome in ("", "lost") for _, outcome in tasks.values())
        return (
            not waiting and len(tasks) >= len(stage.members or [])
        ) or self._state.clock.now() >= self._deadline(stage)

    def _unmasked(self, stage: Stage) -> bool:
        revealed = self._stages.replies(self._number, UNMASK, Revealed)
        over = self._is_over(stage)
        if len(revealed) < self._threshold:
            if not over:
                return False
            return self._abort(f"only {counted(len(revealed), 'contributor')} stayed to unmask")
        members, survivors = (ids(self._stages, self._number, name) for name in (TRAIN, UNMASK))
        try:
            recover(members, survivors, revealed.values(), self._threshold, self._number)
        except GymError as error:
            return self._abort(error.message)  # further shares of the same secret would not help
        failpoint("secure-unmasked")
        return True

    def _abort(self, why: str) -> bool:
        needed = needed_survivors(self._live_config.current)
        if self._objectors:
            objections = counted(len(self._objectors), "participant", "report")
            why = f"{objections} that they received different tasks; {why}"
        self._state.round_store.abort(self._number, f"{why}; {needed} are needed, and nothing was unmasked")
        return True
