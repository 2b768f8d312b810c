"""The base class of data formats, errors about a row, and helpers that read its keys."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from gym_fed.data.bounded import columns_of
from gym_fed.data.rows import MEDIA, RowKind

Raw = dict[str, Any]
Message = dict[str, Any]


class Format(ABC):
    """A layout of rows in files, named by ``data[].format`` and ``--format``."""

    kind: ClassVar[RowKind] = "supervised"
    """Kind of the format's rows; see ``gym_fed.data.rows``."""

    order: ClassVar[int] = 100
    """Position of the format for ``auto``, which tries formats in ascending order, built-in ones first."""

    @classmethod
    @abstractmethod
    def matches(cls, row: Raw) -> bool:
        """Return True if a row has this format's keys; called for rows that no earlier format matches."""

    @abstractmethod
    def read(self, row: Raw) -> Raw:
        """Convert a raw row to a row of ``gym_fed.data.rows``.

        Raises:
            BadRow: If it cannot be used.
        """

    def write(self, row: Raw) -> Raw:
        """Write a row as a raw row, the inverse of ``read``. The caller refuses a row that ``read`` does not restore.

        Raises:
            BadRow: If this format cannot represent the row.
        """
        return row


class BadRow(ValueError):
    """An error in one row, to which the reader adds the place."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


class EmptyCell(BadRow):
    """A required column of the row is empty.

    Args:
        column: Name of the column in messages.
    """

    def __init__(self, column: str) -> None:
        super().__init__(f"{column} is empty", "fill it in, or delete the row")


def as_object(raw: Any) -> Raw:
    """Return ``raw`` if it is a JSON object; raise otherwise.

    Raises:
        BadRow: If it is anything else.
    """
    if not isinstance(raw, dict):
        raise BadRow(f"expected a JSON object, got {type(raw).__name__}", "write each row as { ... }")
    return raw


def string(row: Raw, key: str, *, optional: bool = False) -> str:
    """Return the text under ``key``; ``""`` for an optional key that is missing, null or empty.

    Raises:
        BadRow: If it is not text, or is required and missing or blank.
    """
    value = row.get(key)
    if optional and value is None:
        return ""
    if value is None and key in columns_of(row):
        raise EmptyCell(repr(key))
    if not isinstance(value, str):
        problem = "is missing" if key not in row else f"is {type(value).__name__}"
        raise BadRow(f"{key!r} {problem}, expected text", f"write {key!r} as a JSON string")
    if not optional and not value.strip():
        raise EmptyCell(repr(key))
    return value


def system_of(row: Raw) -> list[Message]:
    """Return the message of a ``system`` (or ``system_prompt``) column, if it is not empty."""
    text = string(row, "system", optional=True) or string(row, "system_prompt", optional=True)
    return [{"role": "system", "content": text}] if text else []


def conversation_of(row: Raw, format: str) -> tuple[list[Message], Raw]:
    """Return the messages of a supervised row to be written as ``format``, and the other keys.

    Raises:
        BadRow: For a row that is not a conversation.
    """
    if "messages" in row:
        return row["messages"], context_of(row)
    remedy = "choose text"
    if "completion" in row:
        remedy = (
            "choose completion; to read a question and its answer as a conversation, use "
            "--columns instruction=QUESTION,output=ANSWER"
        )
    raise BadRow(f"is not a conversation, which {format} needs", remedy)


def context_of(row: Raw) -> Raw:
    """Return the row's ``tools``, media and ``forget``, if it has them."""
    return {key: row[key] for key in ("tools", *MEDIA, "forget") if key in row}


def with_context(row: Raw, converted: Raw, *keys: str) -> Raw:
    """Add the row's ``tools``, ``images``, ``audios``, ``videos`` and ``forget`` to ``converted``.

    Args:
        row: The row as read from the file.
        converted: The row converted so far; media of parts are moved to its columns.
        keys: Keys that were read; other keys are recorded as unread.

    Raises:
        BadRow: For invalid tools, and for media that are given both in a column and in parts.
    """
    note_unread(key for key in row if key not in keys and key not in _CONTEXT)
    if tools := _tools_of(row):
        converted["tools"] = tools
    _require_one_call(row, converted)
    inline = _inline_media(converted)
    for column in MEDIA:
        own, listed = inline[column], _media_of(row, column)
        if own and listed:
            raise BadRow(f"has {column!r} and parts with their own {column}", "keep only one of the two")
        if own or listed:
            converted[column] = [*own, *listed]
    if (forget := row.get("forget")) is not None:
        if not isinstance(forget, bool):
            raise BadRow(f"'forget' is {forget!r}, expected true or false", "use true for rows to unlearn")
        if forget:
            converted["forget"] = True
    return converted


def without_context(row: Raw, converted: Raw, *keys: str) -> Raw:
    """Return ``with_context`` of a row whose format does not support tools, media or a system prompt.

    Raises:
        BadRow: For a row with one of them.
    """
    converted = with_context(row, converted, *keys)
    lost = [key for key in ("tools", *MEDIA) if key in converted] + ["system"] * bool(system_of(row))
    if lost:
        raise BadRow(
            f"has {lost[0]!r}, which rows with {keys[0]!r} do not support",
            "use messages instead, or remove the column",
        )
    return converted


_CONTEXT = (
    *("system", "system_prompt", "tools", "functions", *MEDIA, *MEDIA.values(), "forget"),
    "parallel_tool_calls",
)
_unread: ContextVar[set[str] | None] = ContextVar("unread keys of a row", default=None)


def other_columns(row: Raw) -> Raw:
    """Return the columns of a row that ``with_context`` does not read."""
    return {key: value for key, value in row.items() if key not in _CONTEXT}


def note_unread(names: Iterable[str]) -> None:
    """Record keys of a row whose values are not read; see ``unread_noted``."""
    unread = _unread.get()
    if unread is not None:
        unread.update(map(str, names))


@contextmanager
def unread_noted() -> Iterator[set[str]]:
    """Collect the keys that readers leave unread inside this context."""
    names: set[str] = set()
    token = _unread.set(names)
    try:
        yield names
    finally:
        _unread.reset(token)


def _tools_of(row: Raw) -> list[Raw]:
    """Parse tools in OpenAI's format, ``{"type": "function", "function": {...}}``, or the functions alone.

    Raises:
        BadRow: If ``tools`` (``functions`` in older files) is neither a list of objects with a name nor such a list as
            JSON text.
    """
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str):
        tools = parsed(tools, "tools") if tools.strip() else None
    if not tools:
        return []
    checked = []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(
                "'tools' contains something other than functions", "each tool needs a name and parameters"
            )
        if function is not tool:
            note_unread(f"a tool's {key}" for key in tool if key not in ("type", "function"))
        if isinstance(parameters := function.get("parameters"), str):
            function = {**function, "parameters": parsed(parameters, "parameters")}
        checked.append({"type": "function", "function": function})
    return checked


def _require_one_call(row: Raw, converted: Raw) -> None:
    """Refuse several calls in one turn of a row with ``parallel_tool_calls: false``. Templates do not render the key.

    Raises:
        BadRow: For such a row, and for a key that is not a boolean.
    """
    parallel = row.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise BadRow(f"'parallel_tool_calls' is {parallel!r}, expected true or false", "correct or remove it")
    if parallel is False and any(len(message.get("tool_calls", ())) > 1 for message in _turns_of(converted)):
        raise BadRow(
            "has parallel_tool_calls: false and a turn with several calls",
            "remove the key, or put each call and its result into separate turns",
        )


def _inline_media(converted: Raw) -> dict[str, list[Any]]:
    """Remove the sources from the parts with media, and return them by column, in the order of the conversation."""
    taken: dict[str, list[Any]] = {column: [] for column in MEDIA}
    for turn in _turns_of(converted):
        for part in turn["content"] if isinstance(turn.get("content"), list) else ():
            if (source := part.pop("source", None)) is not None:
                taken[f"{part['type']}s"].append(source)
    return taken


def _turns_of(converted: Raw) -> list[Message]:
    """Return the turns of a converted row: of its conversation, or of its prompt and answers."""
    parts = [converted.get(key) for key in ("messages", "prompt", "completion", "chosen", "rejected")]
    return [turn for turns in parts if isinstance(turns, list) for turn in turns]


def _media_of(row: Raw, column: str) -> list[Any]:
    """Read a column of media, such as ``images`` (or ``image``).

    A medium is a path, a data URL, or ``{"bytes", "path"}`` as in Parquet files; a sound may be ``{"array",
    "sampling_rate"}`` (Hugging Face's ``Audio``), and a video the list of its frames.

    Raises:
        BadRow: For any other value.
    """
    given = row.get(column) or row.get(MEDIA[column])
    if not given:
        return []
    sources = given if isinstance(given, list) else [given]
    sources = [{"bytes": source} if isinstance(source, bytes) else source for source in sources]
    for source in sources:
        frames = source if column == "videos" and isinstance(source, list) and source else [source]
        for medium in frames:
            keys = set(medium) if isinstance(medium, dict) else set()
            is_array = column == "audios" and keys >= {"array", "sampling_rate"}
            if not (isinstance(medium, str) or keys & {"bytes", "path"} or is_array):
                raise BadRow(
                    f"{column!r} holds {type(medium).__name__}",
                    f"use paths of {MEDIA[column]} files in {column!r}",
                )
    return sources


def parsed(text: str, key: str) -> Any:
    """Parse JSON in a text column.

    Raises:
        BadRow: If it is not valid.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"{key!r} is not valid JSON: {error.msg}", "write it as JSON") from error
    except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits, or deeply nested lists
        raise BadRow(f"{key!r} cannot be read as JSON", "write plain JSON without deep nesting") from error
