"""Rows that are tokens already: Axolotl's ``labels``, TRL's ``completion_mask`` and ``assistant_masks``."""

from __future__ import annotations

from typing import Any

from gym_fed.core.text import counted
from gym_fed.data.formats.base import BadRow, Format, Raw, without_context

_MASKS = ("completion_mask", "assistant_masks")
_TEXTS = {"text", "prompt", "conversations", "instruction", "query"}
"""Columns of other formats."""
_LABELS = "-100 for a token that is not trained on, otherwise the token"
_IGNORED = -100


class Tokenized(Format):
    """``{"input_ids": [int], "labels": [int]}``."""

    order = 35

    @classmethod
    def matches(cls, row: Raw) -> bool:
        if "input_ids" not in row:
            return False
        # a dataset mapped through a tokenizer keeps its text columns, which any model can read
        return any(isinstance(row.get(key), list) for key in ("labels", *_MASKS)) or not _TEXTS & row.keys()

    def read(self, row: Raw) -> Raw:
        ids = _numbers(row, "input_ids", None)
        if min(ids) < 0:
            raise BadRow(f"'input_ids' has {min(ids)}", "token ids are integers of at least 0")
        if 0 in _numbers(row, "attention_mask", [1] * len(ids)):
            raise BadRow("'attention_mask' hides tokens", "remove the padding and its mask")
        labels = _numbers(row, "labels", ids)
        for key in _MASKS:
            mask = _numbers(row, key, [1] * len(ids))
            labels = [label if learned else _IGNORED for label, learned in zip(labels, mask, strict=True)]
        if any(label not in (_IGNORED, token) for label, token in zip(labels, ids, strict=True)):
            raise BadRow("'labels' has different tokens than 'input_ids'", f"a label is {_LABELS}")
        converted = {"input_ids": ids, "labels": labels}
        return without_context(row, converted, "input_ids", "labels", "attention_mask", *_MASKS)

    def write(self, row: Raw) -> Raw:
        if "input_ids" not in row:
            raise BadRow("has no tokens", "train with tokenized_path, which stores encoded rows")
        return row


def _numbers(row: Raw, key: str, default: list[int] | None) -> list[int]:
    """Return a list of as many integers as the row has tokens."""
    numbers: Any = row.get(key, default)
    if not isinstance(numbers, list) or not numbers or not all(isinstance(number, int) for number in numbers):
        raise BadRow(f"{key!r} is not a list of integers", "write one number per token")
    if default is not None and len(numbers) != len(default):
        raise BadRow(
            f"{key!r} has {counted(len(numbers), 'number')} for {counted(len(default), 'token')}",
            "write one number per token",
        )
    return [int(number) for number in numbers]
