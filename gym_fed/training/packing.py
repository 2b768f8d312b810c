"""Whole rows that share a row of tokens, without seeing each other; TRL's best-fit-decreasing packing."""

from __future__ import annotations

from typing import Any

from gym_fed.data.encoding import Encoded


def pack_best_fit(rows: list[Encoded], max_length: int) -> list[dict[str, Any]]:
    """Put encoded rows together, the longest first, each where the least room is left (Ding et al. 2024, section 3).

    Args:
        rows: ``{"input_ids", "labels"}``, none longer than ``max_length``.
        max_length: Tokens in a packed row at most.

    Returns:
        ``{"input_ids", "labels", "seq_lengths"}``: of the last, TRL's collator makes positions that begin anew with
        each row, from which transformers makes a mask of blocks.
    """
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
    from trl import pack_dataset

    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        keys = ("input_ids", "labels")
        packed = pack_dataset(
            Dataset.from_dict({key: [row[key] for row in rows] for key in keys}), max_length, "bfd"
        )
        return [dict(row) for row in packed]
    finally:
        if shown:
            enable_progress_bar()
