"""Preference pairs about images, sound and video: their encoding, and the batches of TRL's ``DPOTrainer``."""

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

    ``prompt_ids`` are tokens of the answer: what runs the model once on a row's tokens needs some without media.

    Raises:
        GymError: ``DATA_INVALID`` as ``encode_media_rows``, and for a row that is not a conversation.
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
        learned = [[label for label in each if label != IGNORED] for each, _ in labels.values()]
        kept = [sum(label != IGNORED for label in each[: config.max_length]) for each, _ in labels.values()]
        length = max(len(each) for each, _ in labels.values())
        lost = sum(map(len, learned)) - sum(kept)
        counts.count(length, cut=length > config.max_length, tokens=sum(kept), tokens_cut=lost)
        if all(kept):
            rows_of_pair = {answer: json.dumps(read) for answer, read in pair.items()}
            encoded.append(
                {**rows_of_pair, "prompt_ids": learned[0], "length": min(length, config.max_length)}
            )
    too_long.refuse()
    if not encoded:
        raise counts.nothing_learned(config.max_length)
    report_media(reader.media.counts)
    return EncodedRows(encoded, counts)


def read_pairs(reader: RowReader, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Read both answers of each row like supervised conversations; ``chosen`` and ``rejected``.

    Raises:
        GymError: See ``require_conversations`` and ``RowReader.read``.
    """
    require_conversations(rows)
    return {
        answer: reader.read([_conversation(row, answer) for row in rows], assistant_only=True)
        for answer in _ANSWERS
    }


def _conversation(row: Row, answer: str) -> Row:
    """Return a supervised row of the prompt and one answer, of which only the answer is learned."""
    silent = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in row["prompt"]]
    kept = {key: row[key] for key in ("tools", *MEDIA) if key in row}
    return PlacedDict.like({"messages": [*silent, *row[answer]], **kept}, row)


class PairBatches:
    """Collates rows of ``encode_media_pairs``: the chosen answers, then the rejected ones, each with its media.

    Args:
        batches: Collates conversations.
    """

    def __init__(self, batches: MediaBatches) -> None:
        self._batches = batches

    def __call__(self, encoded: list[dict[str, Any]]) -> Any:
        batch = self._batches([{"row": pair[answer]} for answer in _ANSWERS for pair in encoded])
        batch["completion_mask"] = (batch.pop("labels") != IGNORED).to(torch.int64)
        return batch
