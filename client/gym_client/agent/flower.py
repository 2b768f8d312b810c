"""Between the wire's tasks and Flower's messages: the agent's adapter."""

from __future__ import annotations

from flwr.app import Context, Message, Metadata, RecordDict, UserConfig

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.records import GetObject, PutObject, from_wire, to_wire
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_MAX_REASON = 2_000


def to_message(task: pb.Task, get: GetObject) -> Message:
    """A task as the message that a ``ClientApp`` is called with; array bytes come from ``get``.

    Raises:
        GymError: ``USAGE`` for a task that is no Flower message.
    """
    meta = task.metadata
    try:
        metadata = Metadata(
            run_id=meta.run_id,
            message_id=task.message_id,
            src_node_id=meta.src_node_id,
            dst_node_id=meta.dst_node_id,
            reply_to_message_id=meta.reply_to_message_id,
            group_id=meta.group_id,
            created_at=meta.created_at_seconds,
            ttl=meta.ttl_seconds,
            message_type=meta.message_type,
        )
        # Flower's own nodes give the metadata of a message that arrives; the overloads for apps leave it out.
        content = from_wire(task.content, get)
        message: Message = Message(metadata=metadata, content=content)  # type: ignore[call-overload]
        return message
    except (TypeError, ValueError, KeyError) as error:
        raise GymError(ErrorCode.USAGE, f"task {task.message_id!r} is no Flower message: {error}") from error


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
