"""Rows to token ids and labels: what a trainer sees. Labels of tokens that teach nothing are -100."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from gym_fed.data.row_counts import IGNORED, EncodedRows, RowCounts
from gym_fed.data.row_counts import teaches as _teaches
from gym_fed.data.rows import place_of
from gym_fed.errors import ErrorCode, GymError

__all__ = ["IGNORED", "Encoded", "encode_one", "encode_rows", "iter_encoded", "require_chat_template"]

Encoded = dict[str, list[int]]
_CHUNK_ROWS = 1000


def encode_rows(
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    max_length: int,
    assistant_only: bool = True,
    packing: bool = False,
    keep_all: bool = False,
) -> EncodedRows:
    """Tokenise rows.

    Args:
        tokenizer: Of the model that is trained; conversations need its chat template.
        rows: Supervised rows (``gym_fed.data.rows``): ``messages`` with or without ``tools``, ``text``, or ``prompt``
            and ``completion``; they may be mixed. Rows that are encoded already (``input_ids`` and ``labels``, as a
            ``DataPipeline`` with a tokenizer gives them) are taken as they are.
        max_length: Longer rows are cut to so many tokens.
        assistant_only: In conversations, label the assistant's words alone; of prompt and completion, the completion.
            Texts are always labelled whole.
        packing: Join all rows, with an end token after each, and cut them into rows of ``max_length``.
        keep_all: Leave no row out, as DP-SGD must: how many there are would tell of what is in them.

    Returns:
        ``{"input_ids", "labels"}`` per row, with the ``counts`` of what was learned, cut and dropped on the way. Rows
        whose labels are all ignored after cutting are left out.

    Raises:
        GymError: ``DATA_INVALID`` when there is no chat template, when it refuses a row or drops its tools (the row is
            named), or when nothing is left to learn from.
    """
    counts = RowCounts()
    encoded = _stream(tokenizer, rows, assistant_only)
    if keep_all:
        return EncodedRows([_cut(row, max_length, counts) for row in encoded], counts)
    kept = EncodedRows(_teaching(encoded, max_length, packing, counts), counts)
    if not kept:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"none of the {len(rows)} rows has anything to learn within max_length={max_length} tokens",
            "raise max_length, or shorten the prompts",
        )
    return kept


def iter_encoded(
    tokenizer: Any,
    rows: Iterable[dict[str, Any]],
    *,
    max_length: int,
    assistant_only: bool = True,
    packing: bool = False,
    counts: RowCounts | None = None,
) -> Iterator[Encoded]:
    """``encode_rows`` for a stream: no more than a thousand rows are held. It may end without having given any.

    ``counts`` is filled while rows are taken.
    """
    return _teaching(_stream(tokenizer, rows, assistant_only), max_length, packing, counts or RowCounts())


def _teaching(
    encoded: Iterable[Encoded], max_length: int, packing: bool, counts: RowCounts
) -> Iterator[Encoded]:
    """The rows that teach something within ``max_length``; what happens to each is counted."""
    if packing:
        for row in _packed(counts.given(encoded), max_length):
            if _teaches(row["labels"]):
                yield row
        return
    for row in encoded:
        cut = _cut(row, max_length, counts)
        if _teaches(cut["labels"]):
            yield cut


def _cut(row: Encoded, max_length: int, counts: RowCounts) -> Encoded:
    cut = {key: ids[:max_length] for key, ids in row.items()}
    counts.add(row["labels"], cut["labels"])
    return cut


def encode_one(tokenizer: Any, row: dict[str, Any], *, assistant_only: bool = True) -> Encoded:
    """One row, neither cut nor left out."""
    return _encode_chunk(tokenizer, [row], assistant_only, 1)[0]


def _stream(tokenizer: Any, rows: Iterable[dict[str, Any]], assistant_only: bool) -> Iterator[Encoded]:
    source = iter(rows)
    first = 1
    while chunk := list(islice(source, _CHUNK_ROWS)):
        yield from _encode_chunk(tokenizer, chunk, assistant_only, first)
        first += len(chunk)


def _encode_chunk(
    tokenizer: Any, rows: Sequence[dict[str, Any]], assistant_only: bool, first: int
) -> list[Encoded]:
    """``first`` is the number of the first row, for messages."""
    result: list[Encoded | None] = [None] * len(rows)
    texts: list[int] = []
    chats: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if "messages" in row:  # a call to the template takes one set of tools
            chats.setdefault(json.dumps(row.get("tools")), []).append(i)
        elif "input_ids" in row:
            result[i] = _encoded_before(tokenizer, row, first + i)
        elif "completion" in row:
            result[i] = _encode_completion(tokenizer, row, assistant_only)
        else:
            texts.append(i)
    for group in chats.values():
        numbered = [(first + i, rows[i]) for i in group]
        for i, encoded in zip(group, _encode_chats(tokenizer, numbered, assistant_only), strict=True):
            result[i] = encoded
    if texts:
        for i, ids in zip(texts, tokenizer([rows[i]["text"] for i in texts])["input_ids"], strict=True):
            whole = _ended(tokenizer, ids)
            result[i] = {"input_ids": whole, "labels": whole}
    return [encoded for encoded in result if encoded is not None]


def _encoded_before(tokenizer: Any, row: dict[str, Any], number: int) -> Encoded:
    largest = max(row["input_ids"], default=0)
    if largest >= len(tokenizer):
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place_of(row, number)} holds token {largest}, and the model's tokenizer has {len(tokenizer)}",
            "encode the rows with the tokenizer of the model that is trained",
        )
    return {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}


def _encode_completion(tokenizer: Any, row: dict[str, Any], completion_only: bool) -> Encoded:
    """Both in one piece, as they are met; where a token spans the border, it counts as the completion's."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = _ended(tokenizer, tokenizer(row["prompt"] + row["completion"])["input_ids"])
    shared = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
    return {"input_ids": ids, "labels": [IGNORED] * shared + ids[shared:] if completion_only else ids}


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return ids if ids[-1:] == end else ids + end


def _encode_chats(
    tokenizer: Any, numbered: list[tuple[int, dict[str, Any]]], assistant_only: bool
) -> list[Encoded]:
    """Conversations, each with its row's number, that have the same tools."""
    template = require_chat_template(tokenizer)
    _check_tools_are_used(tokenizer, numbered)
    try:
        return _apply_template(tokenizer, template, [row for _, row in numbered], assistant_only)
    except (TemplateError, TypeError):  # the latter from templates that join what is no text
        for one in numbered:  # which of them was it?
            try:
                _apply_template(tokenizer, template, [one[1]], assistant_only)
            except (TemplateError, TypeError) as error:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{place_of(one[1], one[0])}: the model's chat template refuses it: {error}",
                    "change or drop the row, or use a model whose template takes it",
                ) from error
        raise


def _apply_template(
    tokenizer: Any, template: str, rows: list[dict[str, Any]], assistant_only: bool
) -> list[Encoded]:
    conversations = [row["messages"] for row in rows]
    arguments = {"tokenize": True, "return_dict": True, "tools": rows[0].get("tools")}
    if not assistant_only:
        ids = tokenizer.apply_chat_template(conversations, **arguments)["input_ids"]
        return [{"input_ids": row, "labels": row} for row in ids]
    if "{% generation" not in template and "{%- generation" not in template:
        return [_encode_by_prefix(tokenizer, conversation, arguments) for conversation in conversations]
    out = tokenizer.apply_chat_template(conversations, return_assistant_tokens_mask=True, **arguments)
    return [
        {"input_ids": ids, "labels": [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]}
        for ids, mask in zip(out["input_ids"], out["assistant_masks"], strict=True)
    ]


def _check_tools_are_used(tokenizer: Any, numbered: list[tuple[int, dict[str, Any]]]) -> None:
    """Templates that know no tools leave them out without a word."""
    for number, row in numbered:
        messages, tools = row["messages"], row.get("tools")
        calls = any("tool_calls" in message for message in messages)
        if not tools and not calls:
            continue
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        if tools and text == tokenizer.apply_chat_template(messages, tokenize=False):
            _refuse_tools(place_of(row, number), "has tools")
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        if calls and text == tokenizer.apply_chat_template(silent, tools=tools, tokenize=False):
            _refuse_tools(place_of(row, number), "calls tools")


def _refuse_tools(place: str, what: str) -> None:
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"{place} {what}, but the model's chat template leaves them out",
        "use a model whose chat template knows tools, or drop the row",
    )


def _encode_by_prefix(
    tokenizer: Any, conversation: list[dict[str, Any]], arguments: dict[str, Any]
) -> Encoded:
    """For templates without ``{% generation %}``: an answer is what a turn adds to the prompt before it."""

    def ids_of(messages: list[dict[str, Any]], **more: Any) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, **arguments, **more)["input_ids"])

    ids = ids_of(conversation)
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(conversation):
        if message["role"] == "assistant":
            before = ids_of(conversation[:turn], add_generation_prompt=True)
            after = ids_of(conversation[: turn + 1])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    "the chat template rewrites earlier turns, so the assistant's words cannot be told apart",
                    "set assistant_only_loss: false, or add {% generation %} to the template",
                )
            labels[len(before) : len(after)] = ids[len(before) : len(after)]
    return {"input_ids": ids, "labels": labels}


def require_chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template.

    Raises:
        GymError: ``DATA_INVALID`` when it has none.
    """
    if not tokenizer.chat_template:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the rows are conversations, but the model's tokenizer has no chat template",
            "use rows with text, or a chat model such as gym-nano",
        )
    return str(tokenizer.chat_template)


def _packed(encoded: Iterable[Encoded], max_length: int) -> Iterator[Encoded]:
    """One long row after the other, cut every ``max_length`` tokens; the last may be shorter."""
    rest: Encoded = {"input_ids": [], "labels": []}
    for row in encoded:
        rest = {key: rest[key] + row[key] for key in rest}
        whole = len(rest["input_ids"]) // max_length * max_length
        for at in range(0, whole, max_length):
            yield {key: ids[at : at + max_length] for key, ids in rest.items()}
        rest = {key: ids[whole:] for key, ids in rest.items()}
    if rest["input_ids"]:
        yield rest
