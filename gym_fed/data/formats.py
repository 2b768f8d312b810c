"""Reads datasets: Alpaca, ShareGPT, OpenAI messages and plain text, as JSON or JSONL; bad rows are named.

Whatever comes in, what goes out is ``{"messages": [{"role", "content"}, ...]}`` or ``{"text": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError

Row = dict[str, Any]
FORMATS = ("alpaca", "sharegpt", "messages", "text")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
}
_ROLES = ("system", "user", "assistant")


class _BadRow(ValueError):
    """What is wrong with one row; the reader adds the place."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def load_rows(path: str | Path, format: str = "auto") -> list[Row]:
    """Read a dataset file.

    Args:
        path: A ``.json`` file with a list of rows, a ``.jsonl`` file with a row a line, or a ``.txt`` file, which
            is one text.
        format: ``alpaca``, ``sharegpt``, ``messages``, ``text``, or ``auto`` to tell by the keys of the first row.

    Returns:
        At least one row, each ``{"messages": [...]}`` or ``{"text": str}``.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming file, line (or row) and remedy.
    """
    file = Path(path)
    if format not in (*FORMATS, "auto"):
        raise GymError(ErrorCode.USAGE, f"format {format!r} is unknown", f"one of auto, {', '.join(FORMATS)}")
    if not file.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no data file at {file}", "give the path of a JSON or JSONL file"
        )
    rows: list[Row] = []
    for place, raw in _read(file):
        try:
            if format == "auto":
                format = _detect(raw)
            rows.append(_CONVERT[format](raw))
        except _BadRow as bad:
            raise GymError(ErrorCode.DATA_INVALID, f"{place}: {bad.problem}", bad.remedy) from bad
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, f"{file}: holds no rows", "add at least one row")
    return rows


def _read(file: Path) -> Iterator[tuple[str, Any]]:
    """Raw rows, each with the words that name its place."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"{file}: not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from error
    if file.suffix == ".txt":
        yield str(file), {"text": text}
    elif file.suffix == ".json" or text.lstrip().startswith("["):
        yield from _read_json(file, text)
    else:
        yield from _read_jsonl(file, text)


def _read_json(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}",
            "a .json file is one list of rows; name the file .jsonl if it has a row a line",
        ) from error
    if not isinstance(values, list):
        raise GymError(ErrorCode.DATA_INVALID, f"{file}: expected a list of rows", "put the rows in [ ]")
    for index, value in enumerate(values, start=1):
        yield f"{file}: row {index}", value


def _read_jsonl(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{file}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{file}:{number}: not valid JSON: {error.msg} at column {error.colno}",
                "each line of a .jsonl file is one JSON object",
            ) from error


def _detect(raw: Any) -> str:
    keys = set(raw) if isinstance(raw, dict) else set()
    for format, key in (("messages", "messages"), ("sharegpt", "conversations"), ("alpaca", "instruction")):
        if key in keys:
            return format
    if "text" in keys:
        return "text"
    raise _BadRow(
        f"cannot tell the format from the keys {sorted(map(str, keys))}" if keys else "not a JSON object",
        "rows need messages, conversations (ShareGPT), instruction and output (Alpaca), or text",
    )


def _object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _BadRow(f"expected a JSON object, got {type(raw).__name__}", "write each row as { ... }")
    return raw


def _string(row: dict[str, Any], key: str, *, optional: bool = False) -> str:
    value = row.get(key)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        found = "is missing" if key not in row else f"is {type(value).__name__}"
        raise _BadRow(f"{key!r} {found}, expected text", f"give {key!r} as a JSON string")
    if not optional and not value.strip():
        raise _BadRow(f"{key!r} is empty", "fill it in, or drop the row")
    return value


def _alpaca(raw: Any) -> Row:
    row = _object(raw)
    prompt = _string(row, "instruction")
    extra = _string(row, "input", optional=True)
    messages: list[dict[str, str]] = []
    if system := _string(row, "system", optional=True):
        messages.append({"role": "system", "content": system})
    history = row.get("history") or []
    if not isinstance(history, list):
        raise _BadRow("'history' is not a list", "give it as a list of [question, answer] pairs")
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
            raise _BadRow(
                "'history' holds something that is no pair of texts", "write [question, answer] pairs"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{prompt}\n{extra}" if extra else prompt})
    messages.append({"role": "assistant", "content": _string(row, "output")})
    return {"messages": messages}


def _sharegpt(raw: Any) -> Row:
    row = _object(raw)
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise _BadRow("'conversations' is not a list of turns", "give at least a human and a gpt turn")
    messages = []
    if system := _string(row, "system", optional=True):
        messages.append({"role": "system", "content": system})
    for turn in turns:
        turn = _object(turn)
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise _BadRow(f"'from' is {turn.get('from')!r}, which is no known speaker", f"one of {known}")
        messages.append({"role": role, "content": _string(turn, "value")})
    return _checked(messages)


def _messages(raw: Any) -> Row:
    turns = _object(raw).get("messages")
    if not isinstance(turns, list) or not turns:
        raise _BadRow("'messages' is not a list of turns", "give at least a user and an assistant message")
    messages = []
    for turn in turns:
        turn = _object(turn)
        if turn.get("role") not in _ROLES:
            raise _BadRow(f"role {turn.get('role')!r} is unknown", f"one of {', '.join(_ROLES)}")
        messages.append({"role": turn["role"], "content": _content(turn)})
    return _checked(messages)


def _content(turn: dict[str, Any]) -> str:
    """A text, or OpenAI's list of parts when all of them are text."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return _string(turn, "content")
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not texts or not all(isinstance(text, str) for text in texts):
        raise _BadRow(
            "'content' has parts that are not text", 'give every part as {"type": "text", "text": ...}'
        )
    return "".join(map(str, texts))


def _checked(messages: list[dict[str, str]]) -> Row:
    if not any(m["role"] == "assistant" for m in messages):
        raise _BadRow(
            "nobody answers: no turn of the assistant", "add the assistant's answer, or drop the row"
        )
    return {"messages": messages}


def _text(raw: Any) -> Row:
    return {"text": _string(_object(raw), "text")}


_CONVERT: dict[str, Callable[[Any], Row]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "text": _text,
}
