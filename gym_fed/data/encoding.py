"""Encode rows to token ids and labels; tokens that are not trained on have the label -100."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.data.chat_templates.batches import render_rows
from gym_fed.data.chat_templates.choice import suggested_templates
from gym_fed.data.chat_templates.conversation import ChatRenderer, Reasoning, RenderedConversation
from gym_fed.data.row_counts import IGNORED, EncodedRows, RowCounts, num_labels
from gym_fed.data.row_counts import teaches as _teaches
from gym_fed.data.rows import memory_rows, place_of
from gym_fed.data.string_rows import as_turns

__all__ = [
    "IGNORED",
    "Encoded",
    "encode_one",
    "encode_rows",
    "iter_encoded",
    "require_chat_template",
    "tokenizer_digest",
]

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
    mask_history: bool = False,
    reasoning: Reasoning = "learn",
) -> EncodedRows:
    """Tokenise rows.

    Args:
        tokenizer: The trained model's tokenizer; conversations need its chat template.
        rows: Supervised rows (``gym_fed.data.rows``): ``messages`` with or without ``tools``, ``text``, ``segments``,
            or ``prompt`` and ``completion``; they may be mixed. Prompts and completions that are strings become chat
            turns if the tokenizer has a chat template (``gym_fed.data.string_rows``). Encoded rows (``input_ids`` and
            ``labels``, as returned by a ``DataPipeline`` with a tokenizer) are unchanged.
        max_length: Maximum number of tokens per row; longer rows are truncated.
        assistant_only: True to label only the assistant's text in conversations, and only the completion of a prompt.
            Texts are always labelled completely. Messages with ``weight: 0`` are not labelled.
        packing: True to join all rows, with an end token after each, and cut them into rows of ``max_length``.
        keep_all: True to drop no rows, as DP-SGD requires, since the number of dropped rows depends on their contents.
        mask_history: True to label only the last answer of a conversation.
        reasoning: Treatment of ``reasoning_content``: trained on with the answer, or left out.

    Returns:
        ``{"input_ids", "labels"}`` per row, with the ``counts`` of learned, truncated and dropped rows. Rows whose
        labels are all ignored after truncation are dropped.

    Raises:
        GymError: ``DATA_INVALID`` if there is no chat template; naming the row, if the template refuses it or drops its
            tools or reasoning, or if the assistant's text cannot be located; and if no row has a token to train on.
    """
    counts = RowCounts()
    encoded = iter_encoded(
        tokenizer,
        rows,
        max_length=max_length,
        assistant_only=assistant_only,
        packing=packing,
        keep_all=keep_all,
        counts=counts,
        mask_history=mask_history,
        reasoning=reasoning,
    )
    rows_with_counts = EncodedRows(encoded, counts)
    if not rows_with_counts and not keep_all:
        raise counts.nothing_learned(max_length)
    return rows_with_counts


def iter_encoded(
    tokenizer: Any,
    rows: Iterable[dict[str, Any]],
    *,
    max_length: int,
    assistant_only: bool = True,
    packing: bool = False,
    keep_all: bool = False,
    counts: RowCounts | None = None,
    mask_history: bool = False,
    reasoning: Reasoning = "learn",
) -> Iterator[Encoded]:
    """Stream ``encode_rows``, with at most a thousand rows in memory. May yield nothing.

    ``counts`` is updated during iteration.
    """
    renderer = ChatRenderer(tokenizer, assistant_only, mask_history, reasoning)
    encoded, counts = _stream(renderer, rows), RowCounts() if counts is None else counts
    if keep_all:
        return (_cut(row, max_length, counts) for row in encoded)
    return _teaching(encoded, max_length, packing, counts)


def _teaching(
    encoded: Iterable[Encoded], max_length: int, packing: bool, counts: RowCounts
) -> Iterator[Encoded]:
    """Yield the rows with tokens to train on within ``max_length``, and count the outcome of each row."""
    if packing:
        before, learned = counts.tokens, 0
        for row in _packed(counts.given(encoded), max_length):
            learned += num_labels(row["labels"])
            if _teaches(row["labels"]):
                yield row
        counts.tokens = before + learned
        return
    for row in encoded:
        cut = _cut(row, max_length, counts)
        if _teaches(cut["labels"]):
            yield cut


def _cut(row: Encoded, max_length: int, counts: RowCounts) -> Encoded:
    cut = {key: ids[:max_length] for key, ids in row.items()}
    counts.add(row["labels"], cut["labels"])
    return cut


def encode_one(
    tokenizer: Any,
    row: dict[str, Any],
    *,
    assistant_only: bool = True,
    mask_history: bool = False,
    reasoning: Reasoning = "learn",
) -> Encoded:
    """Encode one row without truncating or dropping it."""
    return _encode_chunk(ChatRenderer(tokenizer, assistant_only, mask_history, reasoning), [row], 1)[0]


def _stream(renderer: ChatRenderer, rows: Iterable[dict[str, Any]]) -> Iterator[Encoded]:
    source = iter(memory_rows(rows))
    first = 1
    while chunk := list(islice(source, _CHUNK_ROWS)):
        yield from _encode_chunk(renderer, chunk, first)
        first += len(chunk)


def _encode_chunk(renderer: ChatRenderer, rows: Sequence[dict[str, Any]], first: int) -> list[Encoded]:
    """Encode a chunk of rows; ``first`` is the number of the first row, for messages."""
    with tokenizer_errors(renderer.tokenizer):
        return _each_encoded(renderer, rows, first)


def _each_encoded(renderer: ChatRenderer, rows: Sequence[dict[str, Any]], first: int) -> list[Encoded]:
    tokenizer = renderer.tokenizer
    rows = as_turns(tokenizer, rows)
    result: list[Encoded | None] = [None] * len(rows)
    texts: list[int] = []
    chats: list[int] = []
    for i, row in enumerate(rows):
        if "messages" in row:
            chats.append(i)
        elif "input_ids" in row:
            result[i] = _encoded_before(tokenizer, row, first + i)
        elif "segments" in row:
            result[i] = _encode_segments(tokenizer, row["segments"], renderer.assistant_only)
        elif "completion" in row:
            result[i] = _encode_completion(tokenizer, row, renderer.assistant_only)
        else:
            texts.append(i)
    if chats:
        encoded_chats = _encode_chats(renderer, [(first + i, rows[i]) for i in chats])
        for i, encoded in zip(chats, encoded_chats, strict=True):
            result[i] = encoded
    if texts:
        for i, ids in zip(texts, text_ids(tokenizer, [rows[i]["text"] for i in texts]), strict=True):
            text_with_end = ended(tokenizer, ids, rows[i]["text"])
            result[i] = {"input_ids": text_with_end, "labels": text_with_end}
    return [encoded for encoded in result if encoded is not None]


def _encoded_before(tokenizer: Any, row: dict[str, Any], number: int) -> Encoded:
    largest = max(row["input_ids"], default=0)
    if largest >= len(tokenizer):
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place_of(row, number)} has token id {largest}, but the model's tokenizer has only "
            f"{counted(len(tokenizer), 'token')}",
            "encode the rows with the tokenizer of the model to train",
        )
    return {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}


def _encode_completion(tokenizer: Any, row: dict[str, Any], completion_only: bool) -> Encoded:
    """Encode prompt and completion as one text; a token that crosses the boundary belongs to the completion."""
    text = row["prompt"] + row["completion"]
    prompt, ids = text_ids(tokenizer, [row["prompt"], text])
    ids = ended(tokenizer, ids, text)
    shared = _shared(prompt, ids)
    return {"input_ids": ids, "labels": [IGNORED] * shared + ids[shared:] if completion_only else ids}


def _encode_segments(tokenizer: Any, segments: Sequence[dict[str, Any]], labelled_only: bool) -> Encoded:
    """Encode each segment separately and without special tokens, as Axolotl does."""
    row: Encoded = {"input_ids": [], "labels": []}
    for segment in segments:
        ids = tokenizer(segment["text"], add_special_tokens=False)["input_ids"]
        row["input_ids"] += ids
        row["labels"] += ids if segment["label"] or not labelled_only else [IGNORED] * len(ids)
    return row


def _shared(part: list[int], whole: list[int]) -> int:
    """Return the number of leading tokens that two texts share."""
    return next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(part))


def _encode_chats(renderer: ChatRenderer, numbered: list[tuple[int, dict[str, Any]]]) -> list[Encoded]:
    """Encode conversations, each with its row number."""
    tokenizer = renderer.tokenizer
    require_chat_template(tokenizer)
    written = render_rows(renderer, [(row, place_of(row, number)) for number, row in numbered])
    texts = [conversation.text for conversation in written]
    if not tokenizer.is_fast:
        return [_encode_in_steps(tokenizer, conversation) for conversation in written]
    # The template writes all special tokens, including BOS.
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        {"input_ids": ids, "labels": _labels(ids, offsets, conversation.spans)}
        for ids, offsets, conversation in zip(out["input_ids"], out["offset_mapping"], written, strict=True)
    ]


def _labels(
    ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """Label the tokens that contain any character to train on."""
    labels, waiting = [IGNORED] * len(ids), deque(spans)
    for at, (start, end) in enumerate(offsets):
        while waiting and waiting[0][1] <= start:
            waiting.popleft()
        if waiting and start < end and waiting[0][0] < end:
            labels[at] = ids[at]
    return labels


def _encode_in_steps(tokenizer: Any, conversation: RenderedConversation) -> Encoded:
    """Encode for tokenizers without character offsets, by tokenising prefixes."""
    ids = tokenizer(conversation.text, add_special_tokens=False)["input_ids"]
    labels = [IGNORED] * len(ids)
    for span in conversation.spans:
        parts = [tokenizer(conversation.text[:at], add_special_tokens=False)["input_ids"] for at in span]
        start, end = (_shared(part, ids) for part in parts)
        end = len(parts[1]) if end < len(parts[1]) else end  # a token that extends past the span is labelled
        labels[start:end] = ids[start:end]
    return {"input_ids": ids, "labels": labels}


def prompt_ids(tokenizer: Any, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
    """Return the token ids of a text, or of a conversation up to the start of the assistant's answer."""
    with tokenizer_errors(tokenizer):
        if isinstance(prompt, str):
            return without_second_bos(tokenizer, list(tokenizer(prompt)["input_ids"]))
        rows = list(prompt)
        encoded = tokenizer.apply_chat_template(
            rows, tokenize=True, return_dict=True, add_generation_prompt=True
        )
        return list(encoded["input_ids"])


def require_chat_template(tokenizer: Any) -> str:
    """Return the tokenizer's chat template, or raise.

    Raises:
        GymError: ``DATA_INVALID`` if it has none.
    """
    if not tokenizer.chat_template:
        names = suggested_templates(tokenizer)
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the rows are conversations, but the model's tokenizer has no chat template",
            (
                f"set chat_template to {names}, or to a Jinja file"
                if names
                else "set chat_template to a Jinja file"
            )
            + "; or use rows with text, or a chat model such as gym-nano",
        )
    return str(tokenizer.chat_template)


def _packed(encoded: Iterable[Encoded], max_length: int) -> Iterator[Encoded]:
    """Concatenate rows and cut them every ``max_length`` tokens; the last row may be shorter."""
    rest: Encoded = {"input_ids": [], "labels": []}
    for row in encoded:
        rest = {key: rest[key] + row[key] for key in rest}
        complete = len(rest["input_ids"]) // max_length * max_length
        for at in range(0, complete, max_length):
            yield {key: ids[at : at + max_length] for key, ids in rest.items()}
        rest = {key: ids[complete:] for key, ids in rest.items()}
    if rest["input_ids"]:
        yield rest


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts with the tokenizer's special tokens, but at most one BOS.

    The post-processors of Llama, Gemma and Mistral put BOS before every text. A text to which the chat template was
    applied already begins with BOS, and models are not trained on two.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: Plain texts, to which the template may have been applied already.
    """
    if not texts:
        return []
    return [without_second_bos(tokenizer, ids) for ids in tokenizer(list(texts))["input_ids"]]


def without_second_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Drop leading BOS tokens that are followed by another one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    repeated = 0
    while bos is not None and ids[repeated : repeated + 2] == [bos, bos]:
        repeated += 1
    return ids[repeated:]


def ended(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """Append the EOS token, unless the text ends with it."""
    end = tokenizer.eos_token_id
    if end is None or ids[-1:] == [end] or text.rstrip().endswith(tokenizer.eos_token):
        return ids
    return [*ids, end]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of everything that affects encoding: vocabulary, merges, rules, special tokens, chat
    template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [type(tokenizer).__name__, rules, tokenizer.chat_template or "", str(tokenizer.eos_token_id)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
