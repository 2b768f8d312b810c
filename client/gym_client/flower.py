"""Between the wire's tasks and Flower's messages: the agent's adapter."""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict, UserConfig

from gym_fed.errors import GymError
from gym_fed.wire.records import GetObject, PutObject, from_wire, to_wire
from gym_fed.wire.v1 import hub_pb2 as pb

_MAX_REASON = 2_000


def to_message(task: pb.Task, get: GetObject) -> Message:
    """A task as the message that a ``ClientApp`` is called with; array bytes come from ``get``."""
    meta = task.metadata
    message = Message(
        from_wire(task.content, get),
        dst_node_id=meta.dst_node_id,
        message_type=meta.message_type,
        ttl=meta.ttl_seconds,
        group_id=meta.group_id,
    )
    # Flower sets these when a message passes its own server; only a message with an id can be replied to.
    message.metadata.__dict__.update(
        _message_id=task.message_id,
        _run_id=meta.run_id,
        _src_node_id=meta.src_node_id,
        _created_at=meta.created_at_seconds,
    )
    return message


def to_submit(message_id: str, reply: Message, put: PutObject) -> pb.SubmitRequest:
    """An app's reply as the request that answers the task; array bytes go to ``put``."""
    if reply.has_error():
        error = pb.ReplyError(code=reply.error.code, reason=(reply.error.reason or "")[:_MAX_REASON])
        return pb.SubmitRequest(message_id=message_id, error=error)
    return to_submit_records(message_id, reply.content, put)


def to_submit_records(message_id: str, records: RecordDict, put: PutObject) -> pb.SubmitRequest:
    """As ``to_submit``, for records that are not in a message."""
    return pb.SubmitRequest(message_id=message_id, content=to_wire(records, put))


def to_refusal(message_id: str, error: GymError) -> pb.SubmitRequest:
    """The answer to a task that failed or was refused on this machine."""
    reason = f"{error.code.value}: {error.message}"[:_MAX_REASON]
    return pb.SubmitRequest(message_id=message_id, error=pb.ReplyError(code=error.exit_code, reason=reason))


def new_context(run_id: int, node_id: int, node_config: UserConfig) -> Context:
    """A context of its own for every run; its state lives as long as the agent."""
    return Context(run_id=run_id, node_id=node_id, node_config=node_config, state=RecordDict(), run_config={})
