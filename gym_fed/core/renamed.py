"""Renamed keys of configs: the old name works, and one line of warning gives the new one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


class RenamedWarning(FutureWarning):
    """An old name was used; the message gives the new one. The three commands print it as one line."""


def warn_renamed(old: str, new: str, place: str = "") -> None:
    """Warn that ``old`` was used.

    Args:
        old: The name that was used.
        new: The name to use instead.
        place: Where it was used, such as ``run.yaml:3:1``; empty where the name says it.
    """
    where = f"{place}: " if place else ""
    warnings.warn(f"{where}{old_name_message(old, new)}", RenamedWarning, stacklevel=2)


def old_name_message(old: str, new: str) -> str:
    """The text of every warning about an old name."""
    return f"`{old}` is now `{new}`; the old name will be removed"


def with_new_names(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Values that an older release has stored, under the names of today. Gives no warning.

    Args:
        values: The stored values.
        names: New name by old name.
    """
    return {names.get(key, key): value for key, value in values.items()}
