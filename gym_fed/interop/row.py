"""A row of the table of aliases: a word of another tool, and our word or what to write instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gym_fed.core.errors import ErrorCode, GymError

Where = Literal["Python", "command", "YAML"]


@dataclass(frozen=True)
class BroughtWord:
    """A word of another tool.

    Attributes:
        where: What it is typed into.
        theirs: As it is typed.
        ours: What it is here; for one that is refused, why.
        instead: The lines to write instead of one that is refused.
    """

    where: Where
    theirs: str
    ours: str
    instead: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """True if it has no counterpart."""
        return bool(self.instead)


@dataclass(frozen=True)
class RefusedWord:
    """Why something has no counterpart, and the two lines to write instead."""

    why: str
    instead: tuple[str, str]

    def error(self, theirs: str, place: str = "", code: ErrorCode = ErrorCode.CONFIG_INVALID) -> GymError:
        """The refusal of ``theirs``."""
        where = f"{place}: " if place else ""
        lines = "\n".join(f"  {line}" for line in self.instead)
        return GymError(code, f"{where}{theirs}: {self.why}", f"write instead:\n{lines}")
