"""Formats of datasets, a file of this folder each: how one raw row becomes a row of ``gym_fed.data.rows``.

To add one, drop ``NAME.py`` with ``read(raw) -> row`` into this folder, and its name into ``FORMATS`` and
``gym_fed.config.data_source.DataFormat``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gym_fed.data.formats.base import BadRow, Raw
from gym_fed.data.formats.labels import label_of
from gym_fed.errors import ErrorCode, GymError

FORMATS = ("alpaca", "sharegpt", "messages", "preference", "kto", "completion", "prompt", "text")


def reader(format: str) -> Callable[[Any], Raw]:
    """The function that reads rows of ``format``; it raises ``BadRow``.

    Raises:
        GymError: ``USAGE`` when there is no such format.
    """
    if format not in FORMATS:
        raise GymError(ErrorCode.USAGE, f"format {format!r} is unknown", f"one of auto, {', '.join(FORMATS)}")
    read: Callable[[Any], Raw] = importlib.import_module(f"{__name__}.{format}").read
    return read


def detect(raw: Any) -> str:
    """The format of a row, told by its keys.

    Raises:
        BadRow: When they fit none.
    """
    keys = set(raw) if isinstance(raw, dict) else set()
    if keys >= {"chosen", "rejected"} or "chosen_messages" in keys or "preferred_output" in keys:
        return "preference"
    answered = bool(keys & {"messages", "conversations", "instruction", "completion"})
    if "kto_tag" in keys or (answered and isinstance(raw.get("label"), bool)):
        return "kto"
    if keys >= {"prompt", "completion", "label"} and label_of(raw["label"]) is not None:
        return "kto"  # as TRL lays them out, also where a table holds 0 and 1
    for format, key in (("messages", "messages"), ("sharegpt", "conversations"), ("alpaca", "instruction")):
        if key in keys:
            return format
    if "prompt" in keys:
        return "completion" if "completion" in keys else "prompt"
    if "text" in keys:
        return "text"
    raise BadRow(
        f"cannot tell the format from the keys {sorted(map(str, keys))}" if keys else "not a JSON object",
        "rows need messages, conversations (ShareGPT), instruction and output (Alpaca), prompt, or text; "
        "columns names them otherwise, such as --columns prompt=question,completion=answer",
    )
