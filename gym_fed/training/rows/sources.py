"""Reads ``data:`` of a config into the rows of a run: every source weighted and in a fixed order."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

from gym_fed.config.train.training import DataConfig, TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.data.rows import PlacedDict
from gym_fed.data.sources import source_rows


def rows_of(config: TrainingConfig, key: Literal["data", "eval_data"] = "data") -> list[dict[str, Any]]:
    """Return every row that ``config.data`` (or ``eval_data``) names, source after source; those to forget are marked.

    Raises:
        GymError: ``CONFIG_INVALID`` when no data is named; see ``source_rows`` for the others.
    """
    sources: list[DataConfig] = getattr(config, key)
    refuse_first((not sources, f"{key}: no rows to train on", "list at least one path or tasks entry"))
    return [row for index, source in enumerate(sources) for row in _weighted(source, config.seed + index)]


def split_rows(
    rows: list[dict[str, Any]], size: float, *, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split rows into training and held-out rows, in order. Equal rows count as one and stay on one side.

    Args:
        rows: All of them, repeated by their weights.
        size: Number of different held-out rows; below 1, their share.
        seed: Decides which.

    Raises:
        GymError: ``CONFIG_INVALID`` when one of the two would be empty.
    """
    keys = list(map(_content, rows))
    different = dict(zip(keys, rows, strict=True))
    number = round(size * len(different)) if size < 1 else round(size)
    reason = f"eval_split: {size:g} of {len(different)} different rows would hold out {number}"
    refuse_first((not 0 < number < len(different), reason, "leave at least one row on both sides"))
    held = set(random.Random(seed).sample(list(different), number))
    return (
        [row for key, row in zip(keys, rows, strict=True) if key not in held],
        [row for key, row in different.items() if key in held],
    )


def count_different(rows: list[dict[str, Any]]) -> int:
    """Return the number of different rows; ``split_rows`` holds out among these."""
    return len(set(map(_content, rows)))


def _content(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=repr)


def _weighted(source: DataConfig, seed: int) -> list[dict[str, Any]]:
    rows = [row for _, row in source_rows(source)]
    times, fraction = divmod(source.weight, 1.0)
    extra = random.Random(seed).sample(rows, round(fraction * len(rows)))
    weighted = rows * int(times) + extra
    if source.role == "forget":
        return [PlacedDict.like({**row, "forget": True}, row) for row in weighted]
    return weighted
