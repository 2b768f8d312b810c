"""JSON that a hub sent: read so that nothing in it ends the process, whatever the hub means by it."""

from __future__ import annotations

import json
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

MAX_DOCUMENT = 1 << 20
"""Characters; a message of the wire holds no more."""


def document(
    text: str, what: str, refusal: ErrorCode = ErrorCode.INTERNAL, **kinds: type | tuple[type, ...]
) -> dict[str, Any]:
    """A JSON object with the keys that are needed.

    Args:
        text: As the hub sent it.
        what: Names it in messages: "a verdict".
        refusal: Code of the error.
        kinds: Type of each key that must be there; a bool is no number.

    Raises:
        GymError: ``refusal`` when it is no such object.
    """
    if len(text) > MAX_DOCUMENT:
        raise _refused(what, f"has {len(text)} characters", refusal)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: lists in lists, thousands deep
        raise _refused(what, "is no JSON", refusal) from error
    if not isinstance(found, dict):
        raise _refused(what, "is no JSON object", refusal)
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind) or (isinstance(found[key], bool) and kind is not bool):
            raise _refused(what, f"has no {key!r} of the type it should have", refusal)
    return found


def verdicts(texts: Any) -> list[dict[str, Any]]:
    """``AccountReply.verdicts_json``: the hub's verdicts on this contributor's updates, newest first.

    Raises:
        GymError: ``INTERNAL`` as ``document``.
    """
    found = [
        document(
            text, "a verdict", update=str, server_round=int, verdict=str, reason=str, bytes=int, credit=int
        )
        for text in texts
    ]
    for one in found:
        entries = one.get("entries", [])
        if not isinstance(entries, list) or not all(type(number) is int for number in entries):
            raise _refused("a verdict", "has entries that are no numbers")
    return found


def _refused(what: str, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> GymError:
    return GymError(
        code,
        f"{what} that the hub sent {why}",
        "its software is broken or hostile: report it to the coordinator",
    )
