"""Encode preference pairs with images, sound or video, and collate them for TRL's ``DPOTrainer``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.row_counts import IGNORED, EncodedRows, RowCounts
from gym_fed.data.rows import MEDIA, PlacedDict, Row, place_of
from gym_fed.training.vision.conversations import (
    RowReader,
    TooLong,
    report_media,
    require_conversations,
    without_media,
)
from gym_fed.training.vision.trainer import MediaBatches

_ANSWERS = ("chosen", "rejected")


def encode_media_pairs(config: TrainingConfig, processor: Any, rows: Sequence[Row]) -> EncodedRows:
    """Return rows for ``PairBatches``: ``chosen`` and ``rejected`` (JSON), ``prompt_ids`` and ``length``.

    ``prompt_ids`` are tokens of the answer, since probing the model (``starts_as_base``) needs tokens without media.

    Raises:
        GymError: ``DATA_INVALID`` as in ``encode_media_rows``, and for a row that is not a conversation.
    """
    reader = RowReader(config, processor)
    rows = list(without_media(rows, reader.media.kinds))
    counts, encoded, too_long = RowCounts(), [], TooLong(config.max_length)
    reads = read_pairs(reader, rows)
    for number, row in enumerate(rows, start=1):
        place = place_of(row, number)
        pair = {answer: reads[answer][number - 1] for answer in _ANSWERS}
        labels = {answer: reader.labels(read, place) for answer, read in pair.items()}
        if (last := max(end for _, end in labels.values())) >= config.max_length:
            too_long.add(row, number, last + 1)
            continue
        limit, both = config.max_length, [row_labels for row_labels, _ in labels.values()]
        answers = [[label for label in row_labels if label != IGNORED] for row_labels in both]
        num_learned = [sum(label != IGNORED for label in row_labels[:limit]) for row_labels in both]
        length = max(map(len, both))
        lost = sum(map(len, answers)) - sum(num_learned)
        counts.count(length, cut=length > limit, tokens=sum(num_learned), tokens_cut=lost)
        if all(num_learned):
            texts = {answer: json.dumps(read) for answer, read in pair.items()}
            encoded.append({**texts, "prompt_ids": answers[0], "length": min(length, limit)})
    too_long.refuse()
    if not encoded:
        raise counts.nothing_learned(config.max_length)
    report_media(reader.media.counts)
    return EncodedRows(encoded, counts)


def read_pairs(reader: RowReader, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Read the conversations that end with ``chosen`` and with ``rejected`` answers, as for supervised rows.

    Raises:
        GymError: See ``require_conversations`` and ``RowReader.read``.
    """
    require_conversations(rows)
    pairs = {answer: [_conversation(row, answer) for row in rows] for answer in _ANSWERS}
    return {answer: reader.read(chats, assistant_only=True) for answer, chats in pairs.items()}


def _conversation(row: Row, answer: str) -> Row:
    """Return a supervised row of the prompt and one answer, in which only the answer is learned."""
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in row["prompt"]]
    others = {key: row[key] for key in ("tools", *MEDIA) if key in row}
    return PlacedDict.like({"messages": [*prompt, *row[answer]], **others}, row)


class PairBatches:
    """Collates rows of ``encode_media_pairs``: first chosen, then rejected answers, each with its media."""

    def __init__(self, collator: MediaBatches) -> None:
        self._collator = collator

    def __call__(self, encoded: list[dict[str, Any]]) -> Any:
        batch = self._collator([{"row": pair[answer]} for answer in _ANSWERS for pair in encoded])
        batch["completion_mask"] = (batch.pop("labels") != IGNORED).to(torch.int64)
        return batch
