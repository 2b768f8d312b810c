"""Locate the learned tokens of rows in a processor's batch, in which media placeholders are expanded."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import Row


def batch_labels(
    tokenizer: Any, batch: Any, rows: Sequence[Row], places: Sequence[str] | None = None
) -> tuple[list[list[int]], list[int]]:
    """Return the labels of each row in a processor's batch, and the position of its last media token.

    Args:
        tokenizer: The processor's tokenizer.
        batch: The result of ``MediaProcessor.inputs``; ``offset_mapping`` and ``text_replacement_offsets`` are removed.
        rows: The rows of the batch, with ``text`` and ``spans``.
        places: The names of the rows in error messages.

    Returns:
        The labels of each row without padding, and the position of the last token of its last medium; -1 if there is
        none.

    Raises:
        GymError: ``DATA_INVALID`` if only answers are learned and the processor does not report the positions of media.
    """
    offsets = batch.pop("offset_mapping", None)
    replaced = batch.pop("text_replacement_offsets", None)
    labels, lasts = [], []
    for i, row in enumerate(rows):
        mask = batch["attention_mask"][i].bool()
        ids = batch["input_ids"][i][mask].tolist()
        expansions = replaced[i] if isinstance(replaced, list) and i < len(replaced) else []
        located = None
        if offsets is not None:
            located = _by_offsets(ids, offsets[i][mask].tolist(), row, expansions)
        if located is None:
            located = _by_tokens(tokenizer, ids, row)
        if located is None:
            place = places[i] if places else f"row {i + 1}"
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: the model's processor does not report the positions of media, so the answers' tokens cannot "
                "be located",
                "set assistant_only_loss: false, which also trains on the prompts",
            )
        labels.append(located[0])
        lasts.append(located[1])
    return labels, lasts


def _by_offsets(
    ids: list[int], offsets: list[list[int]], row: Row, expansions: Sequence[Any]
) -> tuple[list[int], int] | None:
    """Locate spans by the offsets of tokens in the expanded text; None if some expansions are unknown.

    A processor expands placeholders in the text, so a span moves by the length that was inserted before it.
    """
    spans = [(*map(int, each["span"]), *map(int, each["new_span"])) for each in expansions]
    length = len(row["text"]) + sum((new_end - new) - (end - start) for start, end, new, new_end in spans)
    if max((end for _, end in offsets), default=0) != length:
        return None
    last = max((new_end for *_, new_end in spans), default=0)
    ends = [i for i, (start, stop) in enumerate(offsets) if start < last and stop > start]
    old_ends = [end for _, end, _, _ in spans]
    shifts = [0, *(new_end - end for _, end, _, new_end in spans)]
    moved = [[at + shifts[bisect_right(old_ends, at)] for at in span] for span in row["spans"]]
    return span_labels(ids, offsets, moved), max(ends, default=-1)


def _by_tokens(tokenizer: Any, ids: list[int], row: Row) -> tuple[list[int], int] | None:
    """Locate spans by the tokens of the unexpanded text, if expansion only repeats the tokens of placeholders."""
    out = tokenizer(row["text"], add_special_tokens=False, return_offsets_mapping=True)
    unexpanded: list[int] = out["input_ids"]
    labels = span_labels(unexpanded, out["offset_mapping"], row["spans"])
    expanded: list[int] = []
    start, last = 0, -1
    repeated = Counter(ids) - Counter(unexpanded)
    for token, label in zip(unexpanded, labels, strict=True):
        if start == len(ids) or ids[start] != token:
            return None
        end = start + 1
        while end < len(ids) and ids[end] == token and token in repeated:
            end += 1
        expanded += [label] * (end - start)
        last = end - 1 if end - start > 1 else last
        start = end
    return (expanded, last) if start == len(ids) else None


def span_labels(
    ids: Sequence[int], offsets: Sequence[Sequence[int]], spans: Sequence[Sequence[int]]
) -> list[int]:
    """Return the ids of tokens that overlap a span, and ``IGNORED`` for all other tokens."""
    return [
        token if any(start < end and stop > begin for begin, end in spans) and stop > start else IGNORED
        for token, (start, stop) in zip(ids, offsets, strict=True)
    ]
