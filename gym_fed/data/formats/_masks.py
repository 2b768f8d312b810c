"""Read which parts of a turn to train on: weights of turns, flags of content parts and Axolotl's character ranges.

The result has ``weight: 0`` for a message that is not trained on, and ``weight: 1`` for a message that is trained on
without being the assistant's. ``masked`` contains the character ranges ``[start, end)`` that are not trained on, by the
key of the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gym_fed.core.text import counted
from gym_fed.data.formats.base import BadRow, Message, Raw, note_unread

WEIGHTS = ("weight", "train", "training", "loss", "loss_weight", "loss_scale")
_SWITCHES = ("train", "training", "loss")
"""Aliases for ``weight`` with boolean values."""
_DETAILS = ("train_detail", "training_detail")
MASK_KEYS = (*WEIGHTS, *_DETAILS, "masked")
"""Keys of a turn that determine what is trained on."""
PART_FLAGS = ("train", "weight")
"""Keys of a content part that determine whether it is trained on."""
_REMEDY = "a turn is either trained on or not: set the weight to 0 or 1, or drop the row"

_roles: ContextVar[Collection[str] | None] = ContextVar("roles that are trained on", default=None)


@contextmanager
def learning_roles(roles: Collection[str] | None) -> Iterator[None]:
    """Train on the turns of ``roles`` that have no weight themselves; None for the assistant's."""
    token = _roles.set(roles)
    try:
        yield
    finally:
        _roles.reset(token)


def learned_parts(turn: Raw, role: str, keys: dict[str, str]) -> Message:
    """Return the ``weight`` and ``masked`` of a turn, if they differ from the defaults.

    Args:
        turn: The turn as read from the file.
        role: Its role: system, user, assistant or tool.
        keys: Maps a message's keys to the turn's, such as ``{"content": "value"}``.

    Raises:
        BadRow: For weights other than 0 and 1, contradictory weights, and ranges outside the text.
    """
    given, roles = given_weight(turn, role), _roles.get()
    masked: dict[str, list[list[int]]] = {}
    flagged = False
    for ours, theirs in keys.items():
        ranges, has_flags = _masked_of(turn, ours, theirs)
        masked |= {ours: ranges} if ranges else {}
        flagged |= has_flags
    weight = given
    if weight is None:  # as in Axolotl, a turn with a flagged part is trained on
        weight = int(flagged or role in (("assistant",) if roles is None else roles))
    if not weight:
        return {"weight": 0} if role == "assistant" or given == 0 else {}
    return ({} if role == "assistant" else {"weight": 1}) | ({"masked": masked} if masked else {})


def given_weight(turn: Raw, role: str) -> int | None:
    """Return the weight of a turn, 0 or 1; None if it has none."""
    given = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    if role != "assistant":  # ms-swift reads these only for the assistant
        ignored = [key for key in ("loss", "loss_scale") if given.pop(key, None) is not None]
        note_unread(f"a message's {key}" for key in ignored)
    for key, weight in given.items():
        _require_binary(weight, key in _SWITCHES, f"{key!r} of the {role}'s turn")
    if len({float(weight) for weight in given.values()}) > 1:
        raise BadRow(f"{' and '.join(map(repr, given))} of one turn differ", "keep one of them")
    return int(next(iter(given.values()))) if given else None


def _require_binary(weight: Any, switch: bool, what: str) -> None:
    valid = isinstance(weight, bool) if switch else isinstance(weight, int | float) and weight in (0, 1)
    if not valid:
        quoted = isinstance(weight, str) and weight.strip().lower()
        is_value = quoted in (("true", "false") if switch else ("0", "1"))
        remedy = f"write {quoted} without quotation marks" if is_value else _REMEDY
        raise BadRow(f"{what} is {weight!r}, expected {'true or false' if switch else '0 or 1'}", remedy)


def _masked_of(turn: Raw, ours: str, theirs: str) -> tuple[list[list[int]], bool]:
    """Return the ranges of a text that are not trained on, and True if the turn has flags for parts of it."""
    text = turn.get(theirs)
    if isinstance(text, list):
        return _of_parts(text, theirs)
    given = turn.get("masked")
    if isinstance(given, dict):
        ranges = _checked(given.get(ours, []), text, "masked")
        return ranges, bool(ranges)
    if given is not None:
        note_unread(["a message's masked"])  # it is a column of a different tool
    details = next((turn[key] for key in _DETAILS if turn.get(key) is not None), None)
    if not details or ours != "content":
        return [], False
    return _of_details(details, text), True


def _of_parts(parts: list[Any], key: str) -> tuple[list[list[int]], bool]:
    """Return the ranges of parts with ``train: false`` or ``weight: 0``, and True if a part has a flag."""
    ranges, at, flagged = [], 0, False
    for part in parts:
        flags = {
            flag: part[flag] for flag in PART_FLAGS if isinstance(part, dict) and part.get(flag) is not None
        }
        for flag, value in flags.items():
            _require_binary(value, flag in _SWITCHES, f"{flag!r} of a part of {key!r}")
        text = text_of_part(part)
        if text is None and flags:
            raise BadRow(
                f"a part of {key!r} that is not text has a weight",
                "remove the weight: images are not trained on",
            )
        length = len(text or "")
        if length and flags and not any(flags.values()):
            ranges.append([at, at + length])
        flagged |= bool(flags)
        at += length
    return ranges, flagged


def text_of_part(part: Any) -> str | None:
    """Return the text of a content part; None for other parts."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    text = next((part[key] for key in ("text", "value", "content") if key in part), None)
    return text if isinstance(text, str) else None


def _of_details(details: Any, text: Any) -> list[list[int]]:
    """Return the ranges outside those with ``train: true``, whose ends are inclusive (Axolotl)."""
    problem = BadRow(
        "'train_detail' is not a list of ranges",
        'write [{"begin_offset": 0, "end_offset": 8, "train": true}, ...]',
    )
    if not isinstance(details, list) or not isinstance(text, str):
        raise problem
    learned = []
    for detail in details:
        if not isinstance(detail, dict) or not isinstance(detail.get("train"), bool):
            raise problem
        start, end = detail.get("begin_offset"), detail.get("end_offset")
        if not isinstance(start, int) or not isinstance(end, int):
            raise problem
        if detail["train"]:
            learned += _checked([[start, end + 1]], text, "train_detail")
    ranges, at = [], 0
    for start, end in sorted(learned):
        if start > at:
            ranges.append([at, start])
        at = max(at, end)
    return ranges + ([[at, len(text)]] if at < len(text) else [])


def _checked(ranges: Any, text: Any, key: str) -> list[list[int]]:
    length = len(text) if isinstance(text, str) else 0
    for span in ranges if isinstance(ranges, list) else [None]:
        if not (
            isinstance(span, list)
            and len(span) == 2
            and all(type(at) is int for at in span)
            and 0 <= span[0] < span[1] <= length
        ):
            raise BadRow(
                f"{key!r} has a range outside its text, which has {counted(length, 'character')}",
                "correct the offsets",
            )
    return list(ranges)
