"""Read a prompt and its answers, as conversations or texts, in any of the supported layouts."""

from __future__ import annotations

from typing import Any

from gym_fed.data.csv_rows import columns_of
from gym_fed.data.formats._turns import conversation
from gym_fed.data.formats.base import BadRow, Message, Raw, string, system_of

ALPACA_KEYS = ("instruction", "input", "output", "history")
_DOLLY = {"context": "input", "response": "output"}
PROMPT_KEYS = ("prompt", "messages", "conversations", *ALPACA_KEYS)
"""Where a prompt may stand."""


def prompt_and_answers(row: Raw, keys: tuple[str, ...], images: list[Any]) -> tuple[Any, list[Any]]:
    """Return the prompt of a row, and its answers under ``keys``.

    The prompt stands in ``prompt``, ``messages``, ``conversations`` or ``instruction``; without one, it is what the
    answers begin with alike (TRL's implicit prompt).

    Returns:
        A text and texts, or a list of messages and lists of messages.

    Raises:
        BadRow: When an answer is missing or empty, or no prompt can be found.
    """
    answers = [_answer(row, key, images) for key in keys]
    prompt: Any
    if "messages" in row or "conversations" in row:
        key = "messages" if "messages" in row else "conversations"
        prompt = [*system_of(row), *conversation(row[key], key, images)]
    elif "instruction" in row:
        prompt = alpaca_question(row)
    elif isinstance(row.get("prompt"), list):
        prompt = [*system_of(row), *conversation(row["prompt"], "prompt", images)]
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
    return prompt, [_without(prompt, _as_messages(answer)) for answer in answers]


def alpaca_row(row: Raw) -> Raw:
    """Rename Dolly's ``context`` and ``response`` to Alpaca's keys, if there is no ``output``."""
    if "output" in row or "response" not in row:
        return row
    return {_DOLLY.get(key, key) if _DOLLY.get(key) not in row else key: value for key, value in row.items()}


def alpaca_question(row: Raw) -> list[Message]:
    """Convert everything before Alpaca's answer: ``system``, ``history``, ``instruction`` and ``input``."""
    instruction = string(row, "instruction")
    extra = string(row, "input", optional=True)
    messages = system_of(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow("'history' is not a list", "give it as a list of [question, answer] pairs")
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
            raise BadRow(
                "'history' holds something that is no pair of texts", "write [question, answer] pairs"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    return messages


def require_learned(answers: list[Any]) -> None:
    """Refuse answers that are both rated and marked as not learned.

    Raises:
        BadRow: For a message with ``weight`` 0 in an answer.
    """
    if any(isinstance(answer, list) and any(m.get("weight") == 0 for m in answer) for answer in answers):
        raise BadRow(
            "an answer that is judged has a turn with weight 0", "remove the weight, or drop the row"
        )


def _answer(row: Raw, key: str, images: list[Any]) -> Any:
    value = row.get(key)
    if isinstance(value, dict):
        value = [value]
    return conversation(value, key, images) if isinstance(value, list) else string(row, key)


def _as_messages(answer: Any) -> list[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _without(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Strip the prompt from answers that repeat the whole conversation."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt and len(answer) > len(prompt) else answer


def _whole_conversations(prompt: str, answers: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """Split the common prefix, which must contain the prompt's text as a turn, from the rest of each answer."""
    if len(answers) > 1:
        shared, rest = _implicit(answers, keys)
    else:
        shared, rest = answers[0][:-1], [answers[0][-1:]]
    if not any(m["content"] == prompt for m in shared):
        raise BadRow("'prompt' is not what the conversations begin with", "give each of them once")
    return shared, rest


def _implicit(answers: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """The common prefix of all answers, and the rest of each (as in trl.extract_prompt)."""
    problem = f"{' and '.join(map(repr, keys))} do not begin alike, and there is no 'prompt'"
    if len(answers) < 2 or len({type(answer) for answer in answers}) != 1:
        raise BadRow(problem, "give the prompt, as a text or as messages")
    first, second = answers
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if isinstance(first, str):
        while shared and not first[shared - 1].isspace():  # never inside a word
            shared -= 1
        shared = len(first[:shared].rstrip())
    if not shared or shared in (len(first), len(second)):
        raise BadRow(
            problem if not shared else "one answer is the beginning of the other",
            "give the prompt, as a text or as messages",
        )
    return first[:shared], [first[shared:], second[shared:]]
