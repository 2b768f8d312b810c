"""Locate the learned tokens of rows in a processor's batch, in which the places of media are expanded."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.rendering import Span
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import Row


def batch_labels(
    tokenizer: Any, batch: Any, rows: Sequence[Row], places: Sequence[str] | None = None
) -> tuple[list[list[int]], list[int]]:
    """Take the offsets out of a processor's batch, and return each row's labels and the end of its media.

    Args:
        tokenizer: The processor's tokenizer.
        batch: The result of ``MediaProcessor.inputs``; ``offset_mapping`` and ``text_replacement_offsets`` are removed.
        rows: Its rows, with ``text`` and ``spans``.
        places: The names of the rows in messages.

    Returns:
        The labels of each row without padding, and the position of its last medium's last token; -1 for none.

    Raises:
        GymError: ``DATA_INVALID`` for a processor that does not say where it put media, if only answers are learned.
    """
    offsets = batch.pop("offset_mapping", None)
    replaced = batch.pop("text_replacement_offsets", None)
    labels, lasts = [], []
    for number, row in enumerate(rows):
        kept = batch["attention_mask"][number].tolist()
        ids = [token for token, keep in zip(batch["input_ids"][number].tolist(), kept, strict=True) if keep]
        own = replaced[number] if isinstance(replaced, list) and number < len(replaced) else []
        read = None
        if offsets is not None:
            at = [pair for pair, keep in zip(offsets[number].tolist(), kept, strict=True) if keep]
            read = _by_offsets(ids, at, row, own)
        if read is None:
            read = _by_tokens(tokenizer, ids, row)
        if read is None:
            place = places[number] if places else f"row {number + 1}"
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: the model's processor does not report where media are placed, so the answers' tokens cannot "
                "be located",
                "set assistant_only_loss: false, which also learns the prompts",
            )
        labels.append(read[0])
        lasts.append(read[1])
    return labels, lasts


def _by_offsets(
    ids: list[int], offsets: list[list[int]], row: Row, replaced: Sequence[Any]
) -> tuple[list[int], int] | None:
    """Locate spans by the offsets of tokens in the expanded text; None if the expansions are not known.

    A processor expands a medium's place in the text, so spans move by what was inserted before them.
    """
    length = len(row["text"]) + sum(int(one["new_span"][1]) - int(one["new_span"][0]) for one in replaced)
    length -= sum(int(one["span"][1]) - int(one["span"][0]) for one in replaced)
    if max((end for _, end in offsets), default=0) != length:
        return None
    last = max((int(one["new_span"][1]) for one in replaced), default=0)
    ends = [at for at, (start, stop) in enumerate(offsets) if start < last and stop > start]
    return span_labels(ids, offsets, [_moved(span, replaced) for span in row["spans"]]), max(ends, default=-1)


def _by_tokens(tokenizer: Any, ids: list[int], row: Row) -> tuple[list[int], int] | None:
    """Locate spans by the tokens of the unexpanded text, if media only repeat the tokens of their places."""
    out = tokenizer(row["text"], add_special_tokens=False, return_offsets_mapping=True)
    plain: list[int] = out["input_ids"]
    labels = span_labels(plain, out["offset_mapping"], row["spans"])
    whole: list[int] = []
    at, last = 0, -1
    repeated = Counter(ids) - Counter(plain)
    for token, label in zip(plain, labels, strict=True):
        if at == len(ids) or ids[at] != token:
            return None
        end = at + 1
        while end < len(ids) and ids[end] == token and token in repeated:
            end += 1
        whole += [label] * (end - at)
        last = end - 1 if end - at > 1 else last
        at = end
    return (whole, last) if at == len(ids) else None


def _moved(span: Sequence[int], replaced: Sequence[Any]) -> Span:
    """Return a span of the rendered text as a span of the text in which places are expanded."""
    ends = [int(one["span"][1]) for one in replaced]
    gained = [0, *(int(one["new_span"][1]) - int(one["span"][1]) for one in replaced)]
    start, end = (at + gained[bisect_right(ends, at)] for at in span)
    return start, end


def span_labels(
    ids: Sequence[int], offsets: Sequence[Sequence[int]], spans: Sequence[Sequence[int]]
) -> list[int]:
    """Return the ids of tokens that overlap a span, and ``IGNORED`` for others."""
    return [
        token if any(start < end and stop > begin for begin, end in spans) and stop > start else IGNORED
        for token, (start, stop) in zip(ids, offsets, strict=True)
    ]
