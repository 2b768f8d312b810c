"""A conversation as text: turns with a role and content, and metadata for graders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class StringThread:
    """Turns of text; every method that adds one gives a new thread.

    ::

        thread = StringThread([("user", "2 + 2?")], {"answer": "4"})
        thread.assistant("4").last_content()

    Attributes:
        turns: Pairs of role (``system``, ``user``, ``assistant``) and text.
        metadata: Values for graders, such as ``answer`` and ``tests``.

    Raises:
        GymError: ``DATA_INVALID`` for another role, or for content that is not text.
    """

    turns: Sequence[tuple[str, str]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, turn in enumerate(self.turns, 1):
            if len(turn) != 2 or turn[0] not in ROLES or not isinstance(turn[1], str):
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"turn {number} of a StringThread is {str(turn)[:60]!r}",
                    f"write (role, text), where role is one of {', '.join(ROLES)}",
                )
        object.__setattr__(self, "turns", tuple((role, text) for role, text in self.turns))

    @classmethod
    def of_messages(
        cls, messages: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any] | None = None
    ) -> StringThread:
        """Create a thread from messages with ``role`` and ``content``."""
        return cls([(str(m.get("role")), m.get("content")) for m in messages], dict(metadata or {}))  # type: ignore[misc]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> StringThread:
        """Create a thread from a row of ``gym_fed.data``: its conversation or prompt, with other columns as metadata.

        Raises:
            GymError: ``DATA_INVALID`` for a row that is neither.
        """
        rest = {key: value for key, value in row.items() if key not in ("messages", "prompt")}
        if "messages" in row:
            return cls.of_messages(row["messages"], rest)
        if isinstance(row.get("prompt"), str):
            return cls([("user", row["prompt"])], rest)
        if isinstance(row.get("prompt"), list):
            return cls.of_messages(row["prompt"], rest)
        raise GymError(
            ErrorCode.DATA_INVALID, f"no thread in a row with {', '.join(row)}", "give messages or a prompt"
        )

    def system(self, text: str) -> StringThread:
        """Return the thread with a system turn added."""
        return self._with("system", text)

    def user(self, text: str) -> StringThread:
        """Return the thread with a user turn added."""
        return self._with("user", text)

    def assistant(self, text: str) -> StringThread:
        """Return the thread with an assistant turn added."""
        return self._with("assistant", text)

    def last_content(self) -> str:
        """The text of the last turn; empty without one."""
        return self.turns[-1][1] if self.turns else ""

    def messages(self) -> list[dict[str, str]]:
        """The turns in the form of chat templates."""
        return [{"role": role, "content": text} for role, text in self.turns]

    def prompt(self) -> StringThread:
        """Return the thread without a final answer of the assistant."""
        return replace(self, turns=self.turns[:-1]) if self.answered else self

    @property
    def answered(self) -> bool:
        """True if the last turn is the assistant's."""
        return bool(self.turns) and self.turns[-1][0] == "assistant"

    def _with(self, role: str, text: str) -> StringThread:
        return replace(self, turns=(*self.turns, (role, text)))
