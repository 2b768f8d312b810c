"""Converts rows to the form that an algorithm learns from: kind, chat turns, and the default system message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.rows import Row, as_kind
from gym_fed.data.string_rows import as_turns, with_system


def rows_to_learn(config: TrainingConfig, rows: Sequence[Row]) -> list[Row]:
    """Convert rows to the kind of ``config.algorithm``.

    Raises:
        GymError: See ``as_kind``.
    """
    return as_kind(rows, ALGORITHMS.type_of(config.algorithm).row_kind)


def rows_to_encode(config: TrainingConfig, tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Convert rows of ``rows_to_learn`` to the input of ``Algorithm.encode``.

    Rows of plain strings become chat turns where the tokenizer has a chat template, and conversations without a system
    message get ``default_system``.
    """
    turns = as_turns(tokenizer, rows)
    if config.default_system is None:
        return turns
    return [with_system(row, config.default_system) for row in turns]
