"""Whole rows that share a row of tokens, without seeing each other; TRL's best-fit-decreasing packing."""

from __future__ import annotations

from typing import Any

from gym_fed.data.encoding import Encoded
from gym_fed.training.trl_glue import quiet_datasets


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
    from trl import pack_dataset

    columns = {key: [row[key] for row in rows] for key in ("input_ids", "labels")}
    with quiet_datasets():
        return [dict(row) for row in pack_dataset(Dataset.from_dict(columns), max_length, "bfd")]
