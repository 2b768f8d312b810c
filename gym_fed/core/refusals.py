"""Refusals of a config as rows of a table: a condition, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Callable

from gym_fed.core.errors import ErrorCode, GymError

Refusal = tuple[object, str, str | Callable[[], str]]
"""``(applies, reason, remedy)``. A remedy that is slow to write (it lists a registry) is a function."""


def refuse_first(*refusals: Refusal) -> None:
    """Raise the first refusal that applies. All conditions and reasons are evaluated before.

    Raises:
        GymError: ``CONFIG_INVALID`` with its reason and remedy.
    """
    for applies, reason, remedy in refusals:
        if applies:
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy if isinstance(remedy, str) else remedy())
