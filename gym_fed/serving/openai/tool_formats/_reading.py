"""What a reader of calls gives while an answer streams, and the bounds of what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CALL_CHARACTERS = 1 << 18
"""Of one call; a longer one is text."""

MAX_LEAD_CHARACTERS = 256
"""Between the mark of a call and its arguments: white space, or a name."""

Tools = Mapping[str, dict[str, Any] | None]
"""Parameters of the tools, by name; None: any."""


class NewCall(NamedTuple):
    """A call of a known tool, with all of its arguments or their beginning."""

    name: str
    arguments: str


class MoreArguments(NamedTuple):
    """Continues the arguments of the last call."""

    text: str


class PlainText(NamedTuple):
    """What is no call: a malformed one, or what only began as a call may."""

    text: str
    malformed: bool = True


Part = NewCall | MoreArguments | PlainText


@dataclass
class ReadParts:
    """What has been read so far.

    Attributes:
        parts: In order.
        rest: What follows the calls; None: they go on.
    """

    parts: list[Part] = field(default_factory=list)
    rest: str | None = None


class CallReader(ABC):
    """Reads an answer from the mark of a call to the call's end."""

    @abstractmethod
    def feed(self, text: str) -> ReadParts:
        """Take the next text."""

    @abstractmethod
    def end(self) -> list[Part]:
        """The answer is over."""
