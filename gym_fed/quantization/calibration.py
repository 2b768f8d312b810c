"""Calibration text: the contributor's own rows as batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from gym_quant.distill import Batch
from torch import Tensor

from gym_fed.data.encoding import IGNORED, encode_rows
from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.config import Calibration

CalibrationText: TypeAlias = "Sequence[str] | Sequence[dict[str, Any]] | Tensor"
"""Texts; rows as ``load_rows`` gives them (``text`` or ``messages``); or token ids ``[n, t]`` int64, no padding."""


def calibration_batches(
    calibration: CalibrationText, tokenizer: Any, config: Calibration, device: Any = "cpu"
) -> list[Batch]:
    """Tokenise calibration text.

    Texts are joined and cut into sequences, and all of their tokens count. Conversations keep apart, padded, and
    the assistant's words count. Of more than ``calibration_samples`` sequences so many are taken, evenly spaced.

    Raises:
        GymError: ``USAGE`` without a tokenizer for text, ``DATA_INVALID`` when nothing is left to learn from.
    """
    sequences = _sequences(calibration, tokenizer, config.max_length)
    count = min(len(sequences), config.calibration_samples)
    chosen = [sequences[i * len(sequences) // count] for i in range(count)]
    size = config.distill_batch
    found = (_batch(chosen[at : at + size]) for at in range(0, count, size))
    return [Batch(b.ids.to(device), b.mask.to(device), b.counted.to(device)) for b in found]


def plain_sequences(batches: Sequence[Batch]) -> list[Tensor]:
    """The sequences of some batches as ``[1, t]`` or, where nothing is padded, ``[b, t]``: no padding left."""
    found: list[Tensor] = []
    for batch in batches:
        if bool(batch.mask.all()):
            found.append(batch.ids)
        else:
            found += [ids[mask][None] for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    return found


def _sequences(calibration: CalibrationText, tokenizer: Any, max_length: int) -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of each sequence, ``[t]`` int64."""
    if isinstance(calibration, Tensor):
        if (
            calibration.ndim != 2
            or calibration.dtype != torch.int64
            or calibration.shape[0] < 1
            or calibration.shape[1] < 2
        ):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"calibration is a tensor {list(calibration.shape)} {calibration.dtype}",
                "give token ids as [sequences, tokens] int64, or texts, or rows",
            )
        cut = calibration[:, :max_length]
        return [(row, row) for row in cut]
    rows = [{"text": row} if isinstance(row, str) else row for row in calibration]
    if tokenizer is None:
        raise GymError(
            ErrorCode.USAGE,
            "calibration is text, but there is no tokenizer",
            "pass tokenizer=..., give the base by name, or give calibration as token ids",
        )
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, "calibration has no rows", "give at least one text")
    texts = [row for row in rows if "messages" not in row]
    chats = [row for row in rows if "messages" in row]
    encoded = encode_rows(tokenizer, texts, max_length=max_length, packing=True) if texts else []
    if len(encoded) > 1 and len(encoded[-1]["input_ids"]) < max_length:
        encoded.pop()
    encoded += encode_rows(tokenizer, chats, max_length=max_length) if chats else []
    return [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in encoded]


def _batch(sequences: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    width = max(len(ids) for ids, _ in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    counted = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (tokens, labels) in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
        counted[row, : len(tokens) - 1] = labels[1:] != IGNORED
    return Batch(ids, mask, counted)
