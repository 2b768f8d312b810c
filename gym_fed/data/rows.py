"""The six kinds of training rows, and the conversions between them.

=============  =====================================================================================
``supervised``   ``{"messages": [...]}``, ``{"text": str}``, or ``{"prompt": str, "completion": str}``, of which only
               the completion is learned; ``{"segments": [{"text": str, "label": bool}]}``, of which those with a
               label are learned; or token ids and labels, as ``encode_rows`` returns them
``preference``   ``{"prompt": P, "chosen": A, "rejected": A}``
``unpaired``     ``{"prompt": P, "completion": A, "label": bool}``: an answer that was liked, or not
``stepwise``     ``{"prompt": str, "completions": [str], "labels": [bool]}``: the steps of a solution, right or wrong
``prompt``       ``{"prompt": P}`` and, for graders, ``answer`` and the row's other columns
``any``          unchanged rows
=============  =====================================================================================

P and A are lists of messages (conversations), or both strings (plain text, for models without a chat template).
Further keys are ``tools`` (OpenAI's functions, for the chat template) and the media ``images``, ``audios`` and
``videos``: file paths, data URLs or ``{"bytes", "path"}``, in the order of their placeholders. A placeholder is
``<image>``, ``<audio>`` or ``<video>`` in a text, or a part such as ``{"type": "image"}``. A video may be a list of
frames. A message has ``role`` (system, user, assistant, tool), ``content`` and optionally ``name``. An assistant's
message may have ``tool_calls``, ``reasoning_content``, and ``weight: 0`` if it is not trained on. ``weight: 1`` marks
a message of a different role that is learned. ``masked`` contains the character ranges that are not learned, by key of
the message: ``{"content": [[start, end]]}``. ``train_on_eos`` of a row is the setting of its source. ``forget: True``
marks a row to unlearn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.data.column_guess import guess_rest

_SHOWN, _SHOWN_CHARACTERS = 12, 60

Row = dict[str, Any]
MEDIA = {"images": "image", "audios": "audio", "videos": "video"}
"""The part type of each media column; ``<image>``, ``<audio>`` and ``<video>`` are the placeholders in a text."""
RowKind = Literal["supervised", "preference", "unpaired", "stepwise", "prompt", "any"]
_KEYS = {
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "stepwise": ("prompt", "completions", "labels"),
}
_WHOLE = ("messages", "text", "segments", "input_ids")
"""Keys each of which makes a row supervised."""
_REMEDY = {
    "supervised": "use conversations (messages), text, or prompt and completion",
    "preference": "use prompt, chosen and rejected",
    "unpaired": "use prompt, completion and label (true or false, 1 or 0), or preference pairs",
    "stepwise": "use prompt, completions and labels",
    "prompt": "use a prompt, or conversations that end with the assistant",
}


class PlacedDict(dict[str, Any]):
    """A row that stores the place where it was read, so that later errors can name it; equal to a plain dict."""

    place: str | None = None
    unread: tuple[str, ...] = ()
    """Keys of the row in its file that its format does not read."""
    columns: Mapping[str, str] = MappingProxyType({})
    """The file's column names that the user gave, by the names that formats expect."""

    @classmethod
    def of(
        cls, row: Row, place: str | None, unread: Iterable[str] = (), columns: Mapping[str, str] | None = None
    ) -> PlacedDict:
        """Attach ``place`` to ``row``."""
        placed = cls(row)
        placed.place = place
        if columns:
            placed.columns = columns
        if names := tuple(sorted(unread)):
            placed.unread = names
        return placed

    @classmethod
    def like(cls, row: Row, other: Row) -> PlacedDict:
        """Create a row with the place of ``other``, from which it was converted."""
        place, columns = getattr(other, "place", None), getattr(other, "columns", None)
        return cls.of(row, place, getattr(other, "unread", ()), columns)


def unread_keys(rows: Iterable[Row]) -> Counter[str]:
    """Count the rows in which each unread key occurs."""
    return Counter(name for row in rows for name in getattr(row, "unread", ()))


def unread_in_words(counts: Mapping[str, int]) -> str | None:
    """Describe the unread keys; None if there are none."""
    if not counts:
        return None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [
        f"{plain(name, _SHOWN_CHARACTERS)} ({counted(count, 'row')})" for name, count in ordered[:_SHOWN]
    ]
    return f"not read: {', '.join(named)}" + (
        f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    )


def place_of(row: Row, number: int) -> str:
    """Return the name of a row in messages: its place, or its number."""
    return getattr(row, "place", None) or f"row {number}"


def as_kind(rows: Sequence[Row], kind: RowKind) -> list[Row]:
    """Convert rows to one kind, if nothing that the kind needs is lost.

    Conversations become prompts, with the last answer as ``answer``. A preference pair becomes two unpaired rows, a
    prompt, or a supervised row with the chosen answer.

    Raises:
        GymError: ``DATA_INVALID`` naming the first row that cannot be used.
    """
    return list(iter_kind(rows, kind))


def iter_kind(rows: Iterable[Row], kind: RowKind) -> Iterator[Row]:
    """Stream ``as_kind``."""
    for number, row in enumerate(rows, 1):
        if kind == "any":
            yield row
            continue
        place = getattr(row, "place", None)
        for converted in _convert(row, kind, number):
            yield converted if place is None else PlacedDict.like(converted, row)


def kind_of(row: Row) -> RowKind | None:
    """Return the kind of a row; None if it is not a row."""
    if any(key in row for key in _WHOLE):
        return "supervised"
    for kind, keys in _KEYS.items():
        if all(key in row for key in keys):
            return kind  # type: ignore[return-value]  # the keys of _KEYS are kinds
    if "prompt" in row:
        return "supervised" if "completion" in row else "prompt"
    return None


def _convert(row: Row, kind: RowKind, number: int) -> list[Row]:
    actual = kind_of(row)
    _require_types(row, actual, number)
    if getattr(row, "place", None) is None and (problem := surrogate_in(row)) is not None:
        raise GymError(ErrorCode.DATA_INVALID, f"{place_of(row, number)}: {problem}", SURROGATE_REMEDY)
    if actual == kind:
        return [row]
    if actual == "preference":
        rest = _without(row, "chosen", "rejected")
        if kind == "unpaired":
            return [
                {**rest, "completion": row["chosen"], "label": True},
                {**rest, "completion": row["rejected"], "label": False},
            ]
        if kind == "prompt":
            return [rest]
        if kind == "supervised":
            return [_joined(row)]
    if actual == "stepwise":
        return _solution(row, kind, number)
    if actual == "supervised" and kind == "prompt" and "completion" in row:
        rest = _without(row, "completion")
        return [{"answer": row["completion"], **rest}]
    if actual == "supervised" and kind == "prompt" and "messages" in row:
        messages = [_without(message, "weight", "masked") for message in row["messages"]]
        rest = _without(row, "messages", "train_on_eos")
        if messages[-1]["role"] != "assistant":  # earlier answers are a part of the prompt
            return [{**rest, "prompt": messages}]
        if len(messages) > 1:
            return [{"answer": messages[-1]["content"], **rest, "prompt": messages[:-1]}]
    problem = "has no known key" if actual is None else f"is a {actual} row"
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"{place_of(row, number)} {problem}, but {kind} rows are needed",
        f"{_REMEDY[kind]}{_column_remedy(row, kind) if actual in (None, 'prompt') else ''}",
    )


def _solution(row: Row, kind: RowKind, number: int) -> list[Row]:
    """Convert a solution with labelled steps as TRL's documentation does: it is right if every step is right.

    Raises:
        GymError: ``DATA_INVALID`` for a wrong solution that would be trained on.
    """
    rest = _without(row, "completions", "labels")
    if kind == "prompt":
        return [rest]
    solution, is_right = {**rest, "completion": _joined_steps(row["completions"])}, all(row["labels"])
    if kind == "unpaired":
        return [{**solution, "label": is_right}]
    if kind == "supervised" and is_right:
        return [solution]
    problem = (
        "has a wrong step, which would be trained on" if kind == "supervised" else f"is not a {kind} row"
    )
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"{place_of(row, number)} {problem}",
        "drop the row, or train with kto, which learns from right and wrong solutions",
    )


def _without(row: Row, *keys: str) -> Row:
    return {key: value for key, value in row.items() if key not in keys}


def _column_remedy(row: Row, kind: RowKind) -> str:
    """Return a hint with the option that names the columns, if the answer may be in another column."""
    guess = guess_rest([row], kind)
    return (
        ""
        if guess is None or "text" in guess.columns
        else f"; or, if these columns are right: {guess.option}"
    )


def _require_types(row: Row, kind: RowKind | None, number: int) -> None:
    """Check the types of a row's values, since rows may be created in memory."""
    keys: Sequence[str] = _KEYS.get(str(kind), ())
    if kind == "supervised":
        present = [key for key in _WHOLE if key in row]
        keys = present[:1] or ("prompt", "completion")
    elif kind in ("prompt", "stepwise"):
        keys = ("prompt",)
    for key in keys:
        if key not in ("input_ids", "segments", "label") and not _is_text_or_turns(key, row[key]):
            expected = {"text": "text", "messages": "messages"}.get(key, "text or messages")
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place_of(row, number)}: {key!r} is {type(row[key]).__name__}, expected {expected}",
                'write texts as strings, and messages as a list of {"role": ..., "content": ...}',
            )


def _is_text_or_turns(key: str, value: Any) -> bool:
    if isinstance(value, str):
        return key != "messages"
    return (
        key != "text"
        and isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in value)
        and all("content" in turn or "tool_calls" in turn for turn in value)
    )


def _joined(row: Row) -> Row:
    """Join the prompt and the chosen answer to a supervised row."""
    context: Row = {key: row[key] for key in ("tools", *MEDIA, "forget") if key in row}
    prompt, answer = row["prompt"], row["chosen"]
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer, **context}
    return {"messages": [*not_learned(prompt), *answer], **context}


def not_learned(prompt: Sequence[Row]) -> list[Row]:
    """Return the messages of a prompt with weight 0 for the assistant's, so that only the answer is trained on."""
    return [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]


def _joined_steps(steps: Sequence[str]) -> str:
    """Join the steps of a solution, with a line break between steps that white space does not separate."""
    text = ""
    for step in steps:
        apart = not text or text[-1].isspace() or step[:1].isspace()
        text += step if apart else f"\n{step}"
    return text


SURROGATE_REMEDY = "write the whole character (an emoji is two such codes in JSON), or drop the row"
_SURROGATE = re.compile("[\ud800-\udfff]")


def surrogate_in(row: dict[str, Any]) -> str | None:
    """Describe the first unpaired surrogate in a row's texts, which no tokenizer accepts; None if there is none."""
    for key, value in row.items():
        if (surrogate := _first_surrogate(key)) is None:
            surrogate = _first_surrogate(value)
        if surrogate is not None:
            code, at = surrogate
            return f"{key!a} has \\u{code:04x} at character {at}, which is an incomplete character"
    return None


def _first_surrogate(value: Any) -> tuple[int, int] | None:
    """Return the first unpaired surrogate in a value, and its position."""
    if isinstance(value, str):
        match = None if value.isascii() else _SURROGATE.search(value)
        return None if match is None else (ord(match[0]), match.start())
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return next((surrogate for part in value if (surrogate := _first_surrogate(part)) is not None), None)
    return None


def without_filled_nulls(value: Any, feature: Any = None, *, json_is_text: bool = False) -> Any:
    """Return a value of an Arrow table without null fields, at every depth. Nulls that are items of a list are kept.

    Arrow gives all objects of a column the same keys: a tool call ``{"x": 1}`` next to ``{"t": 2}`` is read back as
    ``{"x": 1, "t": None}``. Nulls of the original row look the same and are dropped too.

    Args:
        value: Python objects, as ``to_pylist`` returns them.
        feature: The value's feature in ``datasets``, if any. Values of its ``Json`` feature are unchanged.
        json_is_text: True to parse values of ``Json``, which are texts in a stream without decoding.
    """
    if type(feature).__name__ == "Json":
        return json.loads(value) if json_is_text and isinstance(value, str) else value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, Mapping) else {}
        return {
            key: without_filled_nulls(field, inner.get(key), json_is_text=json_is_text)
            for key, field in value.items()
            if field is not None
        }
    if isinstance(value, list):
        item = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
        return [without_filled_nulls(each, item, json_is_text=json_is_text) for each in value]
    return value


def memory_rows(rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows in memory unchanged, except that nulls added by Arrow are removed from a ``datasets.Dataset``."""
    if type(rows).__module__.partition(".")[0] != "datasets":
        return rows
    features = getattr(rows, "features", None) or {}
    return (without_filled_nulls(row, features) for row in rows)


def representative(rows: Iterable[Row], count: int) -> list[Row]:
    """Choose ``count`` rows that represent all of them, deterministically.

    Rows with equal answers are grouped, and the choice is evenly spaced. A file that is sorted by topic is therefore
    covered to its end, and each label of a classification keeps its share (proportionate systematic sampling; Cochran
    1977, "Sampling Techniques", sec. 5.5 and 8.3).

    Args:
        rows: All rows, which are read twice; memory holds their answers and the chosen rows.
        count: Maximum number of rows to return.

    Raises:
        GymError: ``DATA_INVALID`` if the rows change between the two passes.
    """
    answers = [_answer(row) for row in rows]
    if len(answers) <= count:
        return list(rows)
    times = Counter(answers)
    grouped = sorted(range(len(answers)), key=lambda i: answers[i] if times[answers[i]] > 1 else "")
    places = [grouped[(2 * k + 1) * len(answers) // (2 * count)] for k in range(count)]
    selected = set(places)
    chosen = {place: row for place, row in enumerate(rows) if place in selected}
    if len(chosen) < len(selected):
        reason = "the rows changed while they were being read"
        raise GymError(ErrorCode.DATA_INVALID, reason, "run the command again when the file is complete")
    return [chosen[place] for place in places]


def _answer(row: Row) -> str:
    """Return the answer of a conversation or a prompt; empty for a text."""
    turns = row.get("messages") or row.get("completion") or row.get("answer") or ""
    return str(turns[-1].get("content") if isinstance(turns, list) else turns)
