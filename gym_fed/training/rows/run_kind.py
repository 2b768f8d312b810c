"""The rows that an algorithm learns from, with the system message of the config."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.rows import PlacedDict, Row, as_kind
from gym_fed.kinds import ALGORITHMS


def rows_to_learn(config: TrainingConfig, rows: Sequence[Row]) -> list[Row]:
    """Rows of the kind of ``config.algorithm``; conversations without a system message begin with ``default_system``.

    Raises:
        GymError: See ``as_kind``.
    """
    found = as_kind(rows, ALGORITHMS.type_of(config.algorithm).row_kind)
    if config.default_system is None:
        return found
    return [_begun(row, config.default_system) for row in found]


def _begun(row: Row, system: str) -> Row:
    key = "messages" if "messages" in row else "prompt"
    messages = row.get(key)
    if not isinstance(messages, list) or any(message["role"] == "system" for message in messages):
        return row
    return PlacedDict.like({**row, key: [{"role": "system", "content": system}, *messages]}, row)
