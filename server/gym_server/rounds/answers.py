"""Detection of a task that another call has answered in the meantime."""

from __future__ import annotations

import json

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.rounds.queue import SET_ASIDE
from gym_server.store.tables import messages


def is_answered(tx: Connection, message_id: str, update: str) -> bool:
    """Return True if a task was answered with an update, which a call may send again before the first one returns.

    Raises:
        GymError: ``REPLAYED`` if it was answered with anything else; otherwise calls at the same time could each get a
            verdict, and the last one would replace the first reply.
    """
    answered = messages.c.state.in_(("replied", SET_ASIDE))
    receipt = tx.scalar(select(messages.c.receipt).where(messages.c.message_id == message_id, answered))
    if receipt is None:
        return False
    if json.loads(str(receipt)).get("update") != update:
        raise answered_differently(message_id)
    return True


def answered_differently(message_id: str) -> GymError:
    """Create the error for a second, different answer."""
    return GymError(ErrorCode.REPLAYED, f"task {message_id} was answered with a different reply")
