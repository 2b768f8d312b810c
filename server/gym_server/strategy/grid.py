"""Flower's ``Grid`` interface to the hub: messages are pushed to the queue's table, and replies are read from it.

Flower's own strategies run on it unchanged: arrays of outgoing messages are written to the object store, and those of
replies are read from it. Deltas (``gym.delta.v1``) remain references, and only the merge maps their files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.wire.records import from_wire, to_wire
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.federation import RUN_ID
from gym_server.rounds.queue import LATE, SET_ASIDE, MessageQueue, NewMessage, QueuedMessage
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.replies import MAX_REASON, MAX_RECORDS_BYTES, check_reply
from gym_server.rounds.soup_record import Judgement
from gym_server.state import HubState
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import nodes, readers, updates
from gym_server.store.unavailable import StoreUnavailable

log = logging.getLogger("gym_server")

LOST = 1001
"""Flower error code for a missing reply, after the lease ended or the contributor left."""

MALFORMED = 1002
"""Flower error code for a reply that is not valid Flower content."""

FAILED = 1
"""Flower error code for a contributor's error whose own code is reserved for the hub."""

_HUB_NODE_ID = 1
_POLL_SECONDS = 0.2
_DEFAULT_TTL_SECONDS = 12 * 3600.0


class HubGrid(Grid):
    """A grid whose nodes are the hub's contributors.

    Args:
        state: The hub's state.
        live_config: The current config.
        queue: The message queue.
        max_update_bytes: Size limit of an update, in bytes.
        notify: Called after a push, to wake the work streams.
    """

    def __init__(
        self,
        state: HubState,
        live_config: LiveConfig,
        queue: MessageQueue,
        max_update_bytes: int,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._live_config = state, live_config
        self._queue, self._max_update_bytes = queue, max_update_bytes
        self._notify = notify
        self._opened: set[str] = set()
        """Objects of the last message that every contributor may already read."""
        self._run = Run.create_empty(RUN_ID)
        # Flower's runtime normally sets the task identity of the process, with which Flower stamps messages.
        TaskIdentity.task_id = TaskIdentity.run_id = RUN_ID
        TaskIdentity.node_id = _HUB_NODE_ID

    def set_run(self, run: Run) -> None:
        """Replace the empty run description by Flower's."""
        self._run = run

    @property
    def run(self) -> Run:
        """Return the run; a federation has exactly one."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message as ``Grid`` does; ``ttl`` is in seconds, 12 h by default."""
        return Message(
            content=content,
            message_type=message_type,
            dst_node_id=dst_node_id,
            group_id=group_id,
            ttl=_DEFAULT_TTL_SECONDS if ttl is None else ttl,
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of contributors that are connected or hold a lease."""
        return self._queue.node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages. The same content for the same node and group is not queued twice."""
        new = [self._stored(message) for message in messages]
        ids = self._queue.push_all(new)
        self._notify()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived.

        A lost message yields a reply with the error ``LOST``. A reply that cannot be read is set aside with a verdict,
        and yields the error ``MALFORMED`` from then on.
        """
        return list(self.replies(message_ids))

    def replies(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies of ``pull_messages``, with only one in memory at a time."""
        for message_id in self._queue.ended(message_ids):
            message = self._queue.get(message_id)
            reply = None if message is None else self._reply(message)
            if reply is not None:
                yield reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages, and wait for all replies or at most ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        waiting, replies = list(self.push_messages(messages)), []
        while waiting:
            for message_id in list(waiting):
                for reply in self.pull_messages([message_id]):
                    replies.append(reply)
                    waiting.remove(message_id)
            if end is not None and time.monotonic() >= end:
                break
            if waiting:
                time.sleep(_POLL_SECONDS)
        return replies

    def _stored(self, message: Message) -> NewMessage:
        """Convert a message for the queue, storing its objects and allowing every contributor to read them."""
        metadata = message.metadata
        records = to_wire(message.content, lambda data: _ignore(self._state.store.put_bytes(data)))
        self._open_to_contributors({ref.sha256 for ref in references(records)})
        return NewMessage(
            metadata.dst_node_id,
            metadata.group_id,
            metadata.message_type,
            self._state.clock.now(),
            metadata.ttl,
            records.SerializeToString(deterministic=True),
        )

    def _open_to_contributors(self, names: set[str]) -> None:
        new = names - self._opened
        if not new:
            return
        with self._state.database.transaction() as tx:
            for sha256 in sorted(new):
                insert_if_absent(tx, readers, sha256=sha256, contributor="*")
        self._opened = names

    def _reply(self, message: QueuedMessage) -> Message | None:
        try:
            return self._message(message, **self._outcome(message))
        except StoreUnavailable:  # not a fault of the reply; the caller waits for the store
            raise
        except OSError as error:  # a failure of this machine, not of the reply: it is requested again
            log.error("the reply to task %s cannot be read now: %s", message.message_id, error)
            return None
        except Exception as error:  # noqa: BLE001 (untrusted bytes: their parsers raise no fixed set of exceptions)
            reason = _printable(error)
            self._set_aside(message, reason)
            return self._message(message, error=Error(MALFORMED, f"the reply is malformed: {reason}"))

    def _message(self, message: QueuedMessage, **outcome: Any) -> Message:
        metadata = Metadata(
            run_id=RUN_ID,
            message_id=f"{message.message_id}-reply",
            src_node_id=message.node_id,
            dst_node_id=_HUB_NODE_ID,
            reply_to_message_id=message.message_id,
            group_id=message.group_id,
            created_at=self._state.clock.now(),
            ttl=message.ttl_seconds,
            message_type=message.message_type,
        )
        return Message(metadata=metadata, **outcome)  # type: ignore[call-overload,no-any-return]

    def _outcome(self, message: QueuedMessage) -> dict[str, RecordDict | Error]:
        if message.state == SET_ASIDE:
            return {"error": Error(MALFORMED, "the reply is malformed and was set aside")}
        if message.state == LATE:
            return {"error": Error(LOST, "the round continued without it")}
        if message.state == "lost" or message.reply is None:
            return {"error": Error(LOST, "the contributor disconnected")}
        if len(message.reply) > MAX_RECORDS_BYTES:
            raise GymError(ErrorCode.TOO_LARGE, f"the reply has {counted(len(message.reply), 'byte')}")
        reply = pb.SubmitRequest.FromString(message.reply)
        if reply.HasField("error"):
            code = int(reply.error.code)
            return {"error": Error(FAILED if code in (LOST, MALFORMED) else code, _line(reply.error.reason))}
        cap = self._max_update_bytes
        check_reply(pb.Records.FromString(message.content), reply, cap, self._state.store.size)
        return {"content": from_wire(reply.content, self._read)}

    def _set_aside(self, message: QueuedMessage, reason: str) -> None:
        """Set a reply aside permanently, and record its verdict in the ledger; it earns nothing."""
        server_round = int(message.group_id) if message.group_id.isdecimal() else 0
        with self._state.database.transaction() as tx:
            self._queue.set_aside(tx, message.message_id, reason)
            contributor = str(
                tx.scalar(select(nodes.c.contributor).where(nodes.c.node_id == message.node_id)) or ""
            )
            admitted = (updates.c.message_id == message.message_id) & (updates.c.verdict == "admitted")
            found = tx.scalar(select(updates.c.update_id).where(admitted))
            if found is not None:
                judgement = Judgement(str(found), contributor, "rejected", f"set aside: {reason}")
                self._state.round_store.judge(tx, server_round, judgement)
            else:
                shown_reason = (
                    "" if self._live_config.current.privacy is not None else reason
                )  # the reason may quote submitted content
                body = {"contributor": contributor, "server_round": server_round}
                self._state.ledger.append(
                    tx, "verdict", {**body, "verdict": SET_ASIDE, "reason": shown_reason}
                )
        log.warning(
            "round %s: node %d: its reply is set aside: %s", message.group_id, message.node_id, reason
        )

    def _read(self, ref: pb.ArrayRef) -> bytes:
        return self._state.store.local_path(ref.sha256).read_bytes()


def _line(text: str) -> str:
    """Convert untrusted text to one printable line."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_REASON])


def _printable(error: Exception) -> str:
    text = error.message if isinstance(error, GymError) else f"{type(error).__name__}: {error}"
    return _line(" ".join(text[:300].split()))


def _ignore(_: object) -> None:
    """Ignore the name of stored bytes, since the store and the messages both name them by their sha256."""
