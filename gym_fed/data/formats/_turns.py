"""Parse conversations, prompts and answers in the layouts of OpenAI, Anthropic, ShareGPT, Alpaca, ms-swift and TRL.

Flags for the parts of a message to train on are read in all layouts (``_masks``). ``reasoning_content`` is the
assistant's reasoning, also called ``thinking`` and ``reasoning``.
"""

from __future__ import annotations

from typing import Any

from gym_fed.data.bounded import columns_of
from gym_fed.data.formats._blocks import REASONING, pairs_as_turns, turns_of, with_calls_joined
from gym_fed.data.formats._masks import MASK_KEYS, PART_FLAGS, given_weight, learned_parts, text_of_part
from gym_fed.data.formats.base import (
    BadRow,
    Message,
    Raw,
    as_object,
    note_unread,
    other_columns,
    parsed,
    string,
    system_of,
    with_context,
)

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "tool_call"),
    **dict.fromkeys(
        ("tool", "function", "observation", "observations", "tool_response", "function_response"), "tool"
    ),
}
"""Roles, by their names in ``role`` and ``from``. Calls in separate turns have the role ``tool_call``."""
_SHOWN_ROLES = "system, user, assistant, tool, tool_call"
_READ = {
    *("role", "content", "from", "value", "tool_calls", "function_call", "name", "tool_call_id"),
    *(*MASK_KEYS, *REASONING),
}
_TYPES_OF_MEDIA = {
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
"""The kinds of media of content parts other than images, by their type."""
_READ_IN_PARTS = {
    *("type", "text", "value", "content", "image_url", "image", "url", "path", "source"),
    *PART_FLAGS,
}


def conversation_row(row: Raw, key: str) -> Raw:
    """Return a supervised row from the turns under ``key``, or a prompt row with its columns if there is no answer."""
    messages = [*system_of(row), *conversation(row.get(key), key)]
    if any(message["role"] == "assistant" or message.get("weight") == 1 for message in messages):
        return with_context(row, {"messages": messages}, key)
    columns = {name: value for name, value in other_columns(row).items() if name != key}
    return {**columns, **with_context(row, {"prompt": messages}, *row)}


def conversation(turns: Any, key: str) -> list[Message]:
    """Parse messages with ``role`` and ``content``; assistant messages may have ``tool_calls``.

    Args:
        turns: The row's list of turns, or such a list as JSON text.
        key: The column, for messages.

    Raises:
        BadRow: For rows that are not conversations.
    """
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = parsed(turns, key)
    if not isinstance(turns, list) or not turns:
        example = "a human and a gpt turn" if key == "conversations" else "a user and an assistant message"
        raise BadRow(f"{key!r} is not a list of turns", f"add at least {example}")
    parts = [part for turn in pairs_as_turns(turns) for part in turns_of(as_object(turn))]
    return with_calls_joined([_message(turn) for turn in parts])


def split_answer(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split off the last answer from the messages before it.

    Raises:
        BadRow: If the last turn is not the assistant's, or there is no turn before it.
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow("the last turn is not the assistant's answer", "end the conversation with its answer")
    return messages[:-1], messages[-1:]


def _message(turn: Raw) -> tuple[Message, bool, bool]:
    """Parse a turn; also return whether it consists only of tool calls, and whether it has its own weight."""
    speaker = "from" if "from" in turn else "role"
    role = _ROLES.get(str(turn.get(speaker)).replace("-", "_"))
    if role is None and speaker == "from":
        raise BadRow(
            f"'from' is {turn['from']!r}, which is not a known speaker", f"one of {', '.join(_ROLES)}"
        )
    if role is None:
        raise BadRow(f"role {turn.get('role')!r} is unknown", f"one of {_SHOWN_ROLES}")
    key = "value" if "value" in turn or (speaker == "from" and "content" not in turn) else "content"
    note_unread(f"a message's {name}" for name in turn if name not in _READ)
    calls_alone = role == "tool_call"
    speaker = "assistant" if calls_alone else role
    thought, thought_key = _reasoning(turn, speaker)
    learned = learned_parts(turn, speaker, {"content": key, "reasoning_content": thought_key})
    if calls_alone and "masked" in learned:
        raise BadRow("parts of a tool call have weights", "set a weight for the whole turn")
    message = {**_parsed_turn(turn, role, key), **thought, **learned}
    return message, calls_alone, given_weight(turn, speaker) is not None


def _parsed_turn(turn: Raw, role: str, key: str) -> Message:
    """Parse the role, content and calls of a turn."""
    if role == "tool_call":
        calls = turn.get(key)
        calls = calls if isinstance(calls, dict | list) else parsed(string(turn, key), key)
        return {"role": "assistant", "content": "", "tool_calls": _calls(calls)}
    named = {k: turn[k] for k in ("name",) if isinstance(turn.get(k), str)}
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if calls:
        if role != "assistant":
            raise BadRow(f"'tool_calls' in a turn of the {role}", "only the assistant calls tools")
        content = _content(turn, key) if turn.get(key) else ""
        return {"role": role, "content": content, "tool_calls": _calls(calls), **named}
    if role == "tool":
        answers = {k: turn[k] for k in ("tool_call_id",) if isinstance(turn.get(k), str)}
        content = "" if turn.get(key) == "" else _content(turn, key)
        return {"role": role, "content": content, **named, **answers}
    return {"role": role, "content": _content(turn, key), **named}


def _content(turn: Raw, key: str) -> Any:
    """Parse text or OpenAI's content parts: joined if all are text, else as parts."""
    parts = turn.get(key)
    if not isinstance(parts, list):
        return string(turn, key)
    read = [_part(part) for part in parts]
    if not read:
        raise BadRow(f"{key!r} is empty", "fill it in, or delete the row")
    if any(part["type"] != "text" for part in read):
        return read
    return "".join(part["text"] for part in read)


def _part(part: Any) -> Raw:
    kind = part.get("type") if isinstance(part, dict) else None
    note_unread(f"a part's {key}" for key in part if key not in _READ_IN_PARTS) if kind else None
    if (text := text_of_part(part)) is not None:
        return {"type": "text", "text": text}
    if isinstance(kind, str) and (medium := _TYPES_OF_MEDIA.get(kind)) is not None:
        return _medium(part, medium, kind)
    image: Any = None
    if kind == "image_url":
        place = part.get("image_url", part.get("value"))  # keys of OpenAI and LLaMA-Factory v1
        if isinstance(place, dict):
            note_unread(f"a part's {key}" for key in place if key != "url")
            place = place.get("url")
        image = place
    elif kind == "image":
        keys = ("image", "url", "path", "value")
        if part.get("source") is not None:
            part = {"image": _source(part["source"])}
        image = next((part[k] for k in keys if part.get(k)), None)
        if image is None:  # the image is in the row's ``images``
            return {"type": "image"}
    if not isinstance(image, str | dict):
        raise BadRow(
            f"'content' has parts that are not text, images, audio or video, such as type {str(kind)[:40]!r}",
            'write every part as {"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": ...}}',
        )
    return {"type": "image", "source": image}


def _medium(part: Raw, medium: str, kind: str) -> Raw:
    """Parse an audio or video part; without a ``source``, the file is in the row's column."""
    given = next(
        (part[key] for key in (kind, medium, f"{medium}_url", "url", "path", "value") if part.get(key)), None
    )
    if isinstance(given, dict) and "url" in given:
        given = given["url"]
    if isinstance(given, dict) and isinstance(given.get("data"), str):  # OpenAI's input_audio
        given = f"data:audio/{given.get('format', 'wav')};base64,{given['data']}"
    if given is None:
        return {"type": medium}
    frames = given if isinstance(given, list) and medium == "video" else [given]
    if not all(isinstance(frame, str | dict) for frame in frames):
        raise BadRow(f"'content' has a part of type {kind!r} without a file", f"set {medium!r} to its path")
    return {"type": medium, "source": given}


def _calls(calls: Any) -> list[Raw]:
    """Convert tool calls for chat templates, with arguments as an object."""
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("a tool call has no name", 'write {"name": ..., "arguments": {...}}')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parsed(arguments, "arguments")
        if not isinstance(arguments, dict):
            raise BadRow(
                "a tool call's arguments are not an object", 'write {"name": ..., "arguments": {...}}'
            )
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": function["name"], "arguments": arguments}
        read.append({"type": "function", **identity, "function": function})
    return read


def _source(source: Any) -> Any:
    """Return the location of an image in Anthropic's layout: a data URL or a URL.

    Raises:
        BadRow: For a source with neither.
    """
    if not isinstance(source, dict):
        return source
    key = "data" if source.get("type") == "base64" else "url"
    if not isinstance(source.get(key), str) or not source[key]:
        raise BadRow(f"the source of an image has no {key!r}", "add it, or drop the row")
    return f"data:{source.get('media_type')};base64,{source[key]}" if key == "data" else source[key]


def _reasoning(turn: Raw, role: str) -> tuple[Message, str]:
    """Return ``{"reasoning_content": text}``, empty if a turn has no reasoning, and the key that the text was under.

    Raises:
        BadRow: For reasoning that is not text, is given twice, or is not in the assistant's turn.
    """
    given = {key: _text(turn, key) for key in REASONING}
    texts = {key: text for key, text in given.items() if text}
    if texts and role != "assistant":
        raise BadRow(f"{next(iter(texts))!r} in a turn of the {role}", "only the assistant has reasoning")
    if len(set(texts.values())) > 1:
        raise BadRow(f"{' and '.join(map(repr, texts))} of one turn differ", "keep one of them")
    key = next(iter(texts), "reasoning_content")
    return ({"reasoning_content": texts[key]} if texts else {}), key


def _text(turn: Raw, key: str) -> str:
    """Return a text, which may be given as parts."""
    parts = turn.get(key)
    texts = [text_of_part(part) for part in parts] if isinstance(parts, list) else [None]
    return string(turn, key, optional=True) if None in texts else "".join(map(str, texts))


ALPACA_KEYS = ("instruction", "input", "output", "history")
_ALPACA_NAMES = {"query": "instruction", "context": "input", "response": "output"}
"""Alpaca's keys by those of ms-swift and Dolly."""
PROMPT_KEYS = ("prompt", "messages", "conversations", *ALPACA_KEYS)
"""Keys that may contain a prompt."""


def prompt_and_answers(row: Raw, keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """Return the prompt of a row, and its answers under ``keys``.

    The prompt is in ``prompt``, ``messages``, ``conversations`` or ``instruction``; without one, it is the common
    beginning of the answers (TRL's implicit prompt).

    Returns:
        Prompt and answers: a text and texts, or a list of messages and lists of messages.

    Raises:
        BadRow: If an answer is missing or empty, or there is no prompt.
    """
    answers = [_answer(row, key) for key in keys]
    prompt: Any
    if "messages" in row or "conversations" in row:
        key = "messages" if "messages" in row else "conversations"
        prompt = [*system_of(row), *conversation(row[key], key)]
    elif "instruction" in row:
        prompt = alpaca_question(row)
    elif isinstance(row.get("prompt"), list):
        prompt = [*system_of(row), *conversation(row["prompt"], "prompt")]
    elif "prompt" in row or (len(answers) == 1 and "prompt" in columns_of(row)):
        prompt = string(row, "prompt")
    else:
        return _implicit(answers, keys)
    if isinstance(prompt, str):
        if all(isinstance(answer, str) for answer in answers) and not system_of(row):
            return prompt, answers
        if all(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers):
            return _whole_conversations(prompt, answers, keys)
        prompt = [*system_of(row), {"role": "user", "content": prompt}]
    return prompt, [_without_prompt(prompt, _as_messages(answer)) for answer in answers]


def alpaca_row(row: Raw) -> Raw:
    """Rename ms-swift's ``query`` and ``response``, and Dolly's ``context`` and ``response``, to Alpaca's keys."""
    if not ({"instruction", "query"} & row.keys()) or ("output" in row and "query" not in row):
        return row
    names = {theirs: ours for theirs, ours in _ALPACA_NAMES.items() if ours not in row}
    return {names.get(key, key): value for key, value in row.items()}


def alpaca_question(row: Raw) -> list[Message]:
    """Convert everything before Alpaca's answer: ``system``, ``history``, ``instruction`` and ``input``."""
    instruction = string(row, "instruction")
    extra = string(row, "input", optional=True)
    messages = system_of(row)
    history = row.get("history") or []
    history = parsed(history, "history") if isinstance(history, str) else history
    if not isinstance(history, list):
        raise BadRow("'history' is not a list", "write it as a list of [question, answer] pairs")
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
            raise BadRow(
                "'history' contains something other than pairs of texts", "write [question, answer] pairs"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    return messages


def require_learned(answers: list[Any]) -> None:
    """Refuse answers that are rated but marked as not to be trained on.

    Raises:
        BadRow: For a message with ``weight`` 0, or parts of weight 0, in an answer.
    """
    messages = [message for answer in answers if isinstance(answer, list) for message in answer]
    if any(m.get("weight") == 0 or "masked" in m for m in messages):
        raise BadRow("a rated answer has a turn with weight 0", "remove the weight, or drop the row")


def _answer(row: Raw, key: str) -> Any:
    value = row.get(key)
    if isinstance(value, dict):
        value = [value]
    return conversation(value, key) if isinstance(value, list) else string(row, key)


def _as_messages(answer: Any) -> list[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _without_prompt(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Remove the prompt from answers that repeat the whole conversation."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt and len(answer) > len(prompt) else answer


def _whole_conversations(prompt: str, answers: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """Split off the common prefix, which must contain the prompt's text as a turn, from each answer."""
    if len(answers) > 1:
        shared, rest = _implicit(answers, keys)
    else:
        shared, rest = answers[0][:-1], [answers[0][-1:]]
    if not any(m["content"] == prompt for m in shared):
        raise BadRow("the conversations do not begin with 'prompt'", "begin each of them with the prompt")
    return shared, rest


def _implicit(answers: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """Return the common prefix of all answers, and the rest of each (as in trl.extract_prompt)."""
    problem = f"{' and '.join(map(repr, keys))} have no common beginning, and there is no 'prompt'"
    if len(answers) < 2 or len({type(answer) for answer in answers}) != 1:
        raise BadRow(problem, "add the prompt, as text or as messages")
    first, second = answers
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if isinstance(first, str):
        while shared and not first[shared - 1].isspace():  # do not split inside a word
            shared -= 1
        shared = len(first[:shared].rstrip())
    if not shared or shared in (len(first), len(second)):
        raise BadRow(
            problem if not shared else "one answer is the beginning of the other",
            "add the prompt, as text or as messages",
        )
    return first[:shared], [first[shared:], second[shared:]]
