"""Encode prompts and answers to token ids, truncated to ``max_length``, for algorithms that learn from answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.conversation import Reasoning, write_answered
from gym_fed.data.encoding import ended, require_chat_template, text_ids
from gym_fed.data.row_counts import EncodedRows, RowCounts
from gym_fed.data.rows import Row, place_of

_CHUNK_ROWS = 1000


def encode_answers(
    tokenizer: Any, rows: Iterable[Row], answers: tuple[str, ...], *, reasoning: Reasoning = "learn"
) -> Iterator[dict[str, Any]]:
    """Encode prompts and answers to token ids without truncation, a thousand rows at a time.

    Conversations are rendered with the chat template; plain texts get an end token. As in TRL, the answer starts at the
    first token at which the prompt and the prompt with the answer differ; for a pair, at the earlier of the two.

    Args:
        tokenizer: The tokenizer, which needs a chat template for conversations.
        rows: See ``gym_fed.data.rows``.
        answers: Columns with answers, such as ``("chosen", "rejected")``.
        reasoning: What to do with ``reasoning_content`` of the answers: learn it as part of the answer, or drop it.

    Yields:
        ``{"prompt_ids", "chosen_ids", "rejected_ids"}`` per row: lists of ids.

    Raises:
        GymError: ``DATA_INVALID`` with the row.
    """
    source, first = iter(rows), 1
    while chunk := list(islice(source, _CHUNK_ROWS)):
        for number, row in enumerate(chunk, first):
            _check_row(row, answers, number)
        prompts = _tokenise(tokenizer, chunk, None, first, reasoning)
        columns = [_tokenise(tokenizer, chunk, key, first, reasoning) for key in answers]
        for prompt, *wholes in zip(prompts, *columns, strict=True):
            length = min(_common_prefix(prompt, whole) for whole in wholes)
            parts = {f"{key}_ids": whole[length:] for key, whole in zip(answers, wholes, strict=True)}
            yield {"prompt_ids": prompt[:length], **parts}
        first += len(chunk)


def answer_lengths(encoded: Iterable[dict[str, Any]]) -> list[int]:
    """Return the number of tokens of the prompt with the longer answer, for each row from ``encode_answers``."""
    return [len(row["prompt_ids"]) + max(map(len, answers_of(row))) for row in encoded]


def cut_answers(encoded: Iterable[dict[str, Any]], max_length: int) -> EncodedRows:
    """Return the rows from ``iter_cut``, with their ``counts``.

    Raises:
        GymError: ``DATA_INVALID`` if no rows are left.
    """
    counts = RowCounts()
    cut_rows = EncodedRows(iter_cut(encoded, max_length, counts), counts)
    require_some(cut_rows, counts, max_length)
    return cut_rows


def iter_cut(
    encoded: Iterable[dict[str, Any]], max_length: int, counts: RowCounts
) -> Iterator[dict[str, Any]]:
    """Truncate answers so that prompt and answer have at most ``max_length`` tokens, like TRL's ``keep_start``.

    Rows whose prompt leaves no room for an answer are dropped. ``counts`` is updated while iterating. The key
    ``length`` of a row is the length of the prompt with the longer answer.
    """
    for row in encoded:
        prompt, answers = len(row["prompt_ids"]), answers_of(row)
        room = max(0, max_length - prompt)
        counts.count(
            prompt + max(map(len, answers)),
            cut=any(len(answer) > room for answer in answers),
            tokens=sum(min(len(answer), room) for answer in answers),
            tokens_cut=sum(max(0, len(answer) - room) for answer in answers),
        )
        if room and any(answers):
            cut = {key: value[:room] if key in _answer_keys(row) else value for key, value in row.items()}
            yield {**cut, "length": prompt + max(map(len, answers_of(cut)))}


def require_some(rows: Sequence[Any], counts: RowCounts, max_length: int) -> None:
    """Refuse an empty sequence of encoded rows."""
    if not rows:
        raise counts.nothing_learned(max_length)


def answers_of(row: dict[str, Any]) -> list[list[int]]:
    """Return the ids of an encoded row's answers."""
    return [row[key] for key in _answer_keys(row)]


def _answer_keys(row: dict[str, Any]) -> list[str]:
    return [key for key in row if key.endswith("_ids") and key != "prompt_ids"]


def _check_row(row: Row, answers: tuple[str, ...], number: int) -> None:
    keys = ("prompt", *answers)
    texts = [isinstance(row[key], str) for key in keys]
    if all(texts) or all(_is_conversation(row[key]) for key in keys):
        return
    reason = f"row {number}: {', '.join(keys)} must be lists of messages, or all of them strings"
    raise GymError(ErrorCode.DATA_INVALID, reason, 'write messages as {"role": ..., "content": ...}')


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _tokenise(
    tokenizer: Any, rows: Sequence[Row], answer: str | None, first: int, reasoning: Reasoning
) -> list[list[int]]:
    """Return the ids of prompts (``answer`` None) or of prompts with answers. ``first`` is the first row's number."""
    result: list[list[int]] = [[] for _ in rows]
    chats = [i for i, row in enumerate(rows) if not isinstance(row["prompt"], str)]
    texts = [i for i, row in enumerate(rows) if isinstance(row["prompt"], str)]
    if chats:
        require_chat_template(tokenizer)
        rendered = [_render(tokenizer, rows[i], answer, first + i, reasoning) for i in chats]
        for i, ids in zip(chats, tokenizer(rendered, add_special_tokens=False)["input_ids"], strict=True):
            result[i] = ids
    if texts:
        words = [rows[i]["prompt"] + (rows[i][answer] if answer else "") for i in texts]
        for i, text, ids in zip(texts, words, text_ids(tokenizer, words), strict=True):
            result[i] = ids if answer is None else ended(tokenizer, ids, text)
    return result


def _render(tokenizer: Any, row: Row, answer: str | None, number: int, reasoning: Reasoning) -> str:
    tools = row.get("tools")
    return write_answered(
        tokenizer,
        row["prompt"],
        row[answer] if answer else [],
        (json.loads(tools) if isinstance(tools, str) else tools) or None,
        place_of(row, number),
        reasoning=reasoning,
    )


def _common_prefix(ids: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(ids, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(other)))
