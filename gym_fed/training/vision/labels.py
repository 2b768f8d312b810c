"""Locate the learned tokens of rows in a processor's batch, in which the places of media are expanded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.rendering import Span
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import MEDIA, Row


def batch_labels(
    batch: Any, rows: Sequence[Row], places: Sequence[str] | None = None
) -> tuple[list[list[int]], list[int]]:
    """Take the offsets out of a processor's batch, and return each row's labels and the end of its media.

    A processor expands a medium's place in the text, so spans move by what was inserted before them.

    Args:
        batch: The result of ``MediaProcessor.inputs``; ``offset_mapping`` and ``text_replacement_offsets`` are removed.
        rows: Its rows, with ``text`` and ``spans``.
        places: The names of the rows in messages.

    Returns:
        The labels of each row without padding, and the position of its last medium's last token; -1 for none.

    Raises:
        GymError: ``DATA_INVALID`` for a processor that does not say where it put media, if only answers are learned.
    """
    offsets = batch.pop("offset_mapping", None)
    replaced = batch.pop("text_replacement_offsets", None) or [[]] * len(rows)
    labels, lasts = [], []
    for number, row in enumerate(rows):
        kept = batch["attention_mask"][number].tolist()
        ids = [token for token, keep in zip(batch["input_ids"][number].tolist(), kept, strict=True) if keep]
        has_media = any(row[column] for column in MEDIA)
        at = None
        if offsets is not None:
            at = [pair for pair, keep in zip(offsets[number].tolist(), kept, strict=True) if keep]
        is_moved = at is not None and max((end for _, end in at), default=0) != len(row["text"])
        if at is None or (has_media and is_moved and not replaced[number]):
            if row["spans"] != [[0, len(row["text"])]]:
                place = places[number] if places else f"row {number + 1}"
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{place}: the model's processor does not report where it puts media, so the answers' tokens "
                    "cannot be located",
                    "set assistant_only_loss: false, which learns the prompts, too",
                )
            labels.append(ids)
            lasts.append(len(ids) - 1 if has_media else -1)
            continue
        labels.append(span_labels(ids, at, [_moved(span, replaced[number]) for span in row["spans"]]))
        end = max((int(one["new_span"][1]) for one in replaced[number]), default=0)
        lasts.append(
            max((i for i, (start, stop) in enumerate(at) if start < end and stop > start), default=-1)
        )
    return labels, lasts


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
