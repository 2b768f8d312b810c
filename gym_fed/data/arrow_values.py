"""Remove the nulls that Arrow adds to objects to give them all the same keys.

A tool call ``{"x": 1}`` next to ``{"t": 2}`` comes back from Parquet, the Hub or a ``datasets.Dataset``
as ``{"x": 1, "t": None}``, and would be trained so. A null of the row itself looks the same there, and is
dropped with them; rows of JSON keep their nulls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def without_filled_nulls(value: Any, feature: Any = None, *, json_is_text: bool = False) -> Any:
    """Return a value of an Arrow table without null fields, at every depth. Nulls that are items of a list stay.

    Args:
        value: Python objects, as ``to_pylist`` gives them.
        feature: The value's feature in ``datasets``, if any. Values of its ``Json`` feature are as they were written.
        json_is_text: Parse values of ``Json``, which a stream without decoding gives as text.
    """
    if type(feature).__name__ == "Json":
        return json.loads(value) if json_is_text and isinstance(value, str) else value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, Mapping) else {}
        return {
            key: without_filled_nulls(field, inner.get(key), json_is_text=json_is_text)
            for key, field in value.items()
            if field is not None
        }
    if isinstance(value, list):
        item = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
        return [without_filled_nulls(each, item, json_is_text=json_is_text) for each in value]
    return value


def memory_rows(rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows in memory as they are; rows of a ``datasets.Dataset`` without the nulls that Arrow added."""
    if type(rows).__module__.partition(".")[0] != "datasets":
        return rows
    features = getattr(rows, "features", None) or {}
    return (without_filled_nulls(row, features) for row in rows)
