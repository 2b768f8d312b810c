"""Keys that a config names by their environment variable, never by value."""

from __future__ import annotations

import os

from gym_fed.core.errors import ErrorCode, GymError


def from_environment(variable: str | None, grader: str, key: str) -> str | None:
    """The variable's value; None when no variable is named.

    Raises:
        GymError: ``CONFIG_INVALID`` when it is named and not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"graders: {grader}: {key} names {variable}, which is not set",
            f"export {variable}=... before the run",
        )
    return value
