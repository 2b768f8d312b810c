"""Config checks as table rows: a condition, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Callable

from gym_fed.core.errors import ErrorCode, GymError

Refusal = tuple[object, str, str | Callable[[], str]]
"""``(applies, reason, remedy)``. A remedy that is slow to write (it lists a registry) is a function."""


def refuse_first(*refusals: Refusal) -> None:
    """Raise the first refusal whose condition is true. All conditions and reasons are evaluated first.

    Raises:
        GymError: ``CONFIG_INVALID`` with the refusal's reason and remedy.
    """
    for applies, reason, remedy in refusals:
        if applies:
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy if isinstance(remedy, str) else remedy())
