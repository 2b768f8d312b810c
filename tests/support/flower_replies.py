"""Replies of Flower clients, made without a network: what a strategy's ``aggregate_train`` is given."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.supercore.task_identity import TaskIdentity

# Flower stamps messages with the identity of the process's task, which its own runtime sets.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def task(node_id: int) -> Message:
    """A train message to a node, with the id that only a running Flower gives."""
    message = Message(content=RecordDict({}), message_type=MessageType.TRAIN, dst_node_id=node_id)
    message.metadata.__dict__["_message_id"] = f"task-{node_id}"
    return message


def reply(
    arrays: Mapping[str, np.ndarray], node_id: int = 1, num_examples: float = 1, **metrics: float
) -> Message:
    """What a client sends back."""
    content = RecordDict(
        {
            "arrays": ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()}),
            "metrics": MetricRecord({"num-examples": num_examples, **metrics}),
        }
    )
    return Message(content=content, reply_to=task(node_id))


class NoGrid:
    """Enough of a grid for ``configure_train``: ten nodes."""

    def get_node_ids(self) -> list[int]:
        return list(range(1, 11))


def begin(strategy: object, arrays: Mapping[str, np.ndarray], server_round: int = 1) -> None:
    """What Flower calls before the replies come."""
    record = ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()})
    list(strategy.configure_train(server_round, record, ConfigRecord(), NoGrid()))  # type: ignore[attr-defined]
