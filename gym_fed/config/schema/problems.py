"""Errors about combinations of settings: several reasons at once, each with its key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError


class Problem(NamedTuple):
    """A reason for a refusal."""

    key: str
    """The offending key, as ``gate.screen_updates``; it need not be in the file."""

    text: str
    """The reason and what to write instead; a message continues the key with it."""

    def __str__(self) -> str:
        return f"{self.key} {self.text}" if self.text[:1] != ":" else f"{self.key}{self.text}"


class Problems(ValueError):
    """An error of validators; ``gym_fed.config.yaml.file`` writes a line per problem, with its place in the file.

    Args:
        cause: The section that does not go with the keys, as ``privacy``; empty for none.
        found: At least one.
    """

    def __init__(self, cause: str, found: Iterable[Problem]) -> None:
        self.cause, self.found = cause, list(found)
        text = "; ".join(map(str, self.found))
        super().__init__(f"{cause}: {text}" if cause else text)


def first_problem(error: ValidationError, whole: str = "") -> str:
    """Return the first error of a schema, as ``field.part: reason``.

    Args:
        error: The error of a schema.
        whole: Name of the document for reasons about no field.
    """
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or whole
    return f"{where}: {first['msg']}"
