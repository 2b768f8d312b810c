"""Detection of tool calls in a streaming answer, in the format in which the model writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.serving.openai.tool_formats.base import (
    CallReader,
    MoreArguments,
    Part,
    PlainText,
    Tools,
)

if TYPE_CHECKING:
    from gym_fed.serving.openai.tool_formats.base import ToolFormat

MAX_CALLS = 128
"""Most calls of one answer; further ones are text."""


@dataclass(frozen=True)
class Call:
    """A call that the model requests."""

    name: str
    arguments: str
    """JSON text of an object, or its beginning: ``MoreArguments`` may follow."""

    id: str

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallEnd:
    """The end of the last call; text or another call may follow."""


CallPart = Call | MoreArguments | CallEnd
AnswerPart = str | CallPart
"""Text, a call or its beginning, or more of the last call's arguments."""


class CallParser:
    """Splits an answer into text and calls.

    Text that may be the beginning of a call is held back. An unconstrained call is passed on when it is complete, since
    until then it may turn out to be text. A call that a grammar constrains is passed on while it is written.

    Args:
        form: How the model writes calls.
        tools: The tools that may be called.
        fragments: Whether a grammar constrains the calls, and the caller takes parts of them.
        opened: Whether the answer begins inside a call, after ``form.opening``.
        one: Whether at most one call is allowed; whatever follows it is dropped.
        on_malformed: Called for each text that looked like a call but is malformed.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Tools,
        *,
        fragments: bool = False,
        opened: bool = False,
        one: bool = False,
        on_malformed: Callable[[], object] = lambda: None,
    ) -> None:
        self._form, self._tools, self._fragments, self._one = form, tools, fragments, one
        self._held = ""
        self._may_begin = bool(form.bare)
        self._reader: CallReader | None = self._new_reader("") if opened else None
        self._calls = 0
        self._on_malformed = on_malformed

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text; returns what is certain so far, in the order in which the model wrote it."""
        held, self._held = self._held + text, ""
        parts: list[AnswerPart] = []
        while not self.is_over:
            if self._reader is None:
                before, held = self._up_to_a_call(held)
                parts += [before] if before else []
                if self._reader is None:
                    self._held = held
                    break
            reading = self._reader.feed(held)
            parts += self._taken(reading.parts)
            if reading.rest is None:
                break
            self._reader, held = None, reading.rest
            ended = not any(isinstance(part, PlainText) for part in reading.parts)
            parts += [CallEnd()] if ended else []
            self._may_begin = bool(self._form.bare) and ended
        return parts

    def end(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the rest at the answer's end: held-back text, and calls that were not closed.

        Args:
            cut: Whether the answer was cut short. An incomplete call is not malformed then.
        """
        parts: list[AnswerPart] = []
        if self._reader is not None and not self.is_over:
            parts = self._taken(self._reader.end(), cut=cut)
            self._reader = None
        held, self._held = self._held, ""
        return [*parts, held] if held else parts

    @property
    def is_over(self) -> bool:
        """True if the one call is complete, so that nothing that follows matters."""
        # Without fragments a call is passed on when complete, though its reader may still wait for its closing text.
        return self._one and self._calls > 0 and (self._reader is None or not self._fragments)

    def _up_to_a_call(self, text: str) -> tuple[str, str]:
        """Split off the text before a call; starts a reader at a call, or holds back its possible beginning."""
        if self._calls >= MAX_CALLS:
            return text, ""
        if self._may_begin:
            trimmed = text.lstrip()
            if not trimmed:
                return "", text
            if trimmed.startswith(self._form.bare):
                self._reader = self._new_reader(text[: len(text) - len(trimmed)])
                return "", trimmed
            self._may_begin = False
        marks = [(at, mark) for mark in self._form.marks if (at := text.find(mark)) >= 0]
        if marks:
            at, mark = min(marks)
            self._reader = self._new_reader(mark)
            return text[:at], text[at + len(mark) :]
        kept_back = max((_start_of(mark, text) for mark in self._form.marks), default=0)
        return text[: len(text) - kept_back], text[len(text) - kept_back :]

    def _new_reader(self, mark: str) -> CallReader:
        return self._form.reader(mark, self._tools, fragments=self._fragments)

    def _taken(self, parts: Sequence[Part], *, cut: bool = False) -> list[AnswerPart]:
        answer_parts: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, PlainText):
                if part.malformed and not cut:
                    self._on_malformed()
                answer_parts += [part.text] if part.text else []
            elif isinstance(part, MoreArguments):
                if not (self._one and self._calls > 1):
                    answer_parts.append(part)
            else:
                self._calls += 1
                if not (self._one and self._calls > 1):
                    answer_parts.append(Call(part.name, part.arguments, self._form.call_id()))
        return answer_parts


def _start_of(tag: str, text: str) -> int:
    """Return how many of the last characters of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
