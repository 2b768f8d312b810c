"""Rows to token ids and labels: what a trainer sees. Labels of tokens that teach nothing are -100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.errors import ErrorCode, GymError

Encoded = dict[str, list[int]]
IGNORED = -100
_CHUNK_ROWS = 1000


def encode_rows(
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    max_length: int,
    assistant_only: bool = True,
    packing: bool = False,
) -> list[Encoded]:
    """Tokenise rows.

    Args:
        tokenizer: Of the model that is trained; conversations need its chat template.
        rows: ``{"messages": ...}`` or ``{"text": ...}``, as ``load_rows`` gives them; the two may be mixed.
        max_length: Longer rows are cut to so many tokens.
        assistant_only: In conversations, label the assistant's words alone. Texts are always labelled whole.
        packing: Join all rows, with an end token after each, and cut them into rows of ``max_length``.

    Returns:
        ``{"input_ids", "labels"}`` per row. Rows whose labels are all ignored after cutting are left out.

    Raises:
        GymError: ``DATA_INVALID`` when there is no chat template, or when nothing is left to learn from.
    """
    encoded: list[Encoded] = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        encoded += _encode_chunk(tokenizer, rows[start : start + _CHUNK_ROWS], assistant_only)
    if packing:
        encoded = _pack(encoded, max_length)
    cut = [{key: ids[:max_length] for key, ids in row.items()} for row in encoded]
    # The first token is never predicted, so a row teaches only if a later one has a label.
    kept = [row for row in cut if any(label != IGNORED for label in row["labels"][1:])]
    if not kept:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"none of the {len(rows)} rows has anything to learn within max_length={max_length} tokens",
            "raise max_length, or shorten the prompts",
        )
    return kept


def _encode_chunk(tokenizer: Any, rows: Sequence[dict[str, Any]], assistant_only: bool) -> list[Encoded]:
    result: list[Encoded | None] = [None] * len(rows)
    chats = [i for i, row in enumerate(rows) if "messages" in row]
    texts = [i for i, row in enumerate(rows) if "messages" not in row]
    if chats:
        for i, encoded in zip(
            chats, _encode_chats(tokenizer, [rows[i] for i in chats], assistant_only), strict=True
        ):
            result[i] = encoded
    if texts:
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        for i, ids in zip(texts, tokenizer([rows[i]["text"] for i in texts])["input_ids"], strict=True):
            whole = ids if ids[-1:] == end else ids + end
            result[i] = {"input_ids": whole, "labels": whole}
    return [encoded for encoded in result if encoded is not None]


def _encode_chats(tokenizer: Any, rows: list[dict[str, Any]], assistant_only: bool) -> list[Encoded]:
    template = require_chat_template(tokenizer)
    conversations = [row["messages"] for row in rows]
    if not assistant_only:
        ids = tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True)["input_ids"]
        return [{"input_ids": row, "labels": row} for row in ids]
    if "{% generation" not in template and "{%- generation" not in template:
        return [_encode_by_prefix(tokenizer, conversation) for conversation in conversations]
    out = tokenizer.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        {"input_ids": ids, "labels": [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]}
        for ids, mask in zip(out["input_ids"], out["assistant_masks"], strict=True)
    ]


def _encode_by_prefix(tokenizer: Any, conversation: list[dict[str, str]]) -> Encoded:
    """For templates without ``{% generation %}``: an answer is what a turn adds to the prompt before it."""
    ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(conversation):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(
                conversation[:turn], tokenize=True, return_dict=True, add_generation_prompt=True
            )["input_ids"]
            after = tokenizer.apply_chat_template(conversation[: turn + 1], tokenize=True, return_dict=True)[
                "input_ids"
            ]
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


def _pack(encoded: list[Encoded], max_length: int) -> list[Encoded]:
    ids = [i for row in encoded for i in row["input_ids"]]
    labels = [i for row in encoded for i in row["labels"]]
    return [
        {"input_ids": ids[at : at + max_length], "labels": labels[at : at + max_length]}
        for at in range(0, len(ids), max_length)
    ]
