"""The base class of tool call formats, and the parser that splits a streaming answer into text and calls."""

from __future__ import annotations

import json
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from gym_fed.serving.reasoning.base import start_of

MAX_CALL_CHARACTERS = 1 << 18
"""Maximum number of characters of one call; a longer call is returned as text."""

MAX_LEAD_CHARACTERS = 256
"""Maximum number of characters between the mark of a call and its arguments: white space, or a name."""

Tools = Mapping[str, dict[str, Any] | None]
"""Parameters of the tools, by name; None: any arguments."""


class NewCall(NamedTuple):
    """A call of a known tool, with all its arguments or the beginning of them."""

    name: str
    arguments: str


class MoreArguments(NamedTuple):
    """Further arguments of the last call."""

    text: str


class PlainText(NamedTuple):
    """Text that is not a call: malformed, or similar to the beginning of one."""

    text: str
    malformed: bool = True


Part = NewCall | MoreArguments | PlainText


@dataclass
class ReadParts:
    """The result of reading a part of an answer.

    Attributes:
        parts: The parts, in order.
        rest: The text after the calls; None: the calls continue.
    """

    parts: list[Part] = field(default_factory=list)
    rest: str | None = None


class CallReader(ABC):
    """Reads an answer from the mark of a call to the call's end."""

    @abstractmethod
    def feed(self, text: str) -> ReadParts:
        """Add text."""

    @abstractmethod
    def end(self) -> list[Part]:
        """End the answer, and return the remaining parts."""


Row = dict[str, Any]
"""A message in the form that templates expect."""


class ToolFormat(ABC):
    """The format in which a family of models writes tool calls. One object belongs to one template."""

    order: ClassVar[int] = 100
    """``auto`` tries formats in this order, built-in ones before those from other packages."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts that announce a call anywhere. If one of them is a control token of the tokenizer, only that token
    does."""

    controls: ClassVar[tuple[str, ...]] = ()
    """Other texts of the format that may be control tokens."""

    bare: ClassVar[str] = ""
    """A character that announces a call at the beginning of an answer."""

    close: ClassVar[str] = ""
    """The text that ends a call, if any."""

    opening: ClassVar[str] = ""
    """The end of a prompt whose answer must be a call."""

    reasoning_parser: ClassVar[str] = ""
    """The reasoning parser whose output this format reads, if it needs one."""

    describes: ClassVar[bool] = False
    """True if ``prepare`` adds the tools to the messages, so that the template need not support tools."""

    def learn(self, written: str) -> bool:
        """Return True if a template writes this format.

        Args:
            written: The rendered call of the tool ``probe``; the caller checks that ``reader`` finds the call in it.
        """
        return True

    def hinted(self, shown: str) -> bool:
        """Return True if a template's text about tools (``shown``) describes this format, although it shows no call."""
        return False

    @abstractmethod
    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        """Create a reader for the text after a mark.

        Args:
            mark: The mark; for a bare call, the white space before it.
            tools: The tools that may be called.
            fragments: True if calls may be passed on while they are written.
        """

    @abstractmethod
    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        """Return the grammar of an answer whose calls are constrained to the parameters of their tools.

        Args:
            tools: The tools that may be called.
            one: True if at most one call is allowed.
            required: True if the answer is one call, and begins after ``opening``.

        Raises:
            CannotHold: For parameters that this format cannot be constrained to.
        """

    def prepare(self, rows: Sequence[Row], tools: Sequence[Row], *, system: bool) -> list[Row]:
        """Convert messages to the form that the model's template takes.

        Args:
            rows: The rows of the request.
            tools: The tools of the request, as templates get them.
            system: True if the template takes a system message.
        """
        return list(rows)

    def call_id(self) -> str:
        """Return the id of a new call."""
        return f"call_{secrets.token_hex(12)}"


class CannotHold(ValueError):
    """Raised if a format cannot be constrained to parameters; the message names them and the reason."""


class CallGrammar:
    """A grammar in Lark's notation for llguidance, with the schemas that it refers to.

    Args:
        lark: Rules, ``start`` first; they may use ``TEXT``. Write texts with ``quoted`` and marks with ``mark``.
        schemas: JSON schemas by their names after ``@`` in ``lark``.
    """

    def __init__(self, lark: str, schemas: Mapping[str, dict[str, Any]]) -> None:
        self.lark = lark
        self.schemas = dict(schemas)


def bodies(tools: Tools, begin: str, end: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the alternatives of a call for a ``CallGrammar``, and its schemas.

    Args:
        tools: The tools that may be called.
        begin: The text before the arguments, in Lark's notation; ``NAME`` in it is replaced with the tool's name.
        end: The text after them.
    """
    rules, schemas = [], {}
    for number, (name, parameters) in enumerate(tools.items()):
        schema = f"arguments_{number}"
        schemas[schema] = parameters or {"type": "object"}
        rules.append(f"{begin.replace('NAME', name)} @{schema} {end}")
    return " | ".join(rules), schemas


_SPECIAL = "\x00"


def quoted(text: str) -> str:
    """Return a text in Lark's notation."""
    return json.dumps(text)


def mark(text: str) -> str:
    """Return a mark for the rules of a ``CallGrammar``: a control token if the tokenizer has it, otherwise a text."""
    return f"{_SPECIAL}{text}{_SPECIAL}"


def with_control_tokens(lark: str, control: Mapping[str, int]) -> str:
    """Replace the marks in rules.

    A rule ``NAME[lazy]: TEXT mark`` ends free text at the first mark. A control token ends it without ``lazy``.
    """

    def lazy(match: re.Match[str]) -> str:
        rule, before, text = match.groups()
        if text in control:
            return f"{rule}: {before} <[{control[text]}]>"
        return f"{rule}[lazy]: {before} {quoted(text)}"

    lark = re.sub(rf"(\w+)\[lazy\]: (\w+) {_SPECIAL}([^{_SPECIAL}]*){_SPECIAL}", lazy, lark)
    return re.sub(
        rf"{_SPECIAL}([^{_SPECIAL}]*){_SPECIAL}",
        lambda found: f"<[{control[found[1]]}]>" if found[1] in control else quoted(found[1]),
        lark,
    )


MAX_CALLS = 128
"""Maximum number of calls of one answer; further ones are returned as text."""


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
"""Text, a call or its beginning, or further arguments of the last call."""


class CallParser:
    """Splits an answer into text and calls.

    Text that may be the beginning of a call is held back. An unconstrained call is passed on when it is complete, since
    until then it may turn out to be text. A call that a grammar constrains is passed on while it is written.

    Args:
        form: The format of the model's calls.
        tools: The tools that may be called.
        fragments: True if a grammar constrains the calls, and the caller takes parts of them.
        opened: True if the answer begins inside a call, after ``form.opening``.
        one: True if at most one call is allowed; everything after it is dropped.
        on_malformed: Called for each text that looked like a call but is malformed.

    Attributes:
        calls_at: The start and end of each call, in characters of the answer.
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
        self._fed = 0
        self._call_start, self._calls_before = 0, 0
        self.calls_at: list[tuple[int, float]] = []
        self._on_malformed = on_malformed

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text, and return the parts that are certain so far, in the order in which the model wrote them."""
        held, self._held = self._held + text, ""
        self._fed += len(text)
        parts: list[AnswerPart] = []
        while not self.is_over:
            if self._reader is None:
                start = self._fed - len(held)
                before, held = self._split_at_call(held)
                parts += [before] if before else []
                self._call_start, self._calls_before = start + len(before), self._calls
                if self._reader is None:
                    self._held = held
                    break
            reading = self._reader.feed(held)
            parts += self._taken(reading.parts)
            if reading.rest is None:
                break
            self._reader, held = None, reading.rest
            self._end_call(self._fed - len(held))
            ended = not any(isinstance(part, PlainText) for part in reading.parts)
            parts += [CallEnd()] if ended else []
            self._may_begin = bool(self._form.bare) and ended
        if self.is_over and not (self.calls_at and self.calls_at[-1][1] == math.inf):
            self.calls_at.append((self._call_start, math.inf))
        return parts

    def end(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the rest at the end of the answer: held-back text, and calls that were not closed.

        Args:
            cut: True if the answer was cut off; an incomplete call is then not malformed.
        """
        parts: list[AnswerPart] = []
        if self._reader is not None and not self.is_over:
            parts = self._taken(self._reader.end(), cut=cut)
            self._reader = None
            self._end_call(self._fed)
        held, self._held = self._held, ""
        return [*parts, held] if held else parts

    @property
    def settled(self) -> int:
        """The number of characters of the answer that are known to be text or a call."""
        if self.is_over:
            return self._fed
        return self._fed - len(self._held) if self._reader is None else self._call_start

    @property
    def is_over(self) -> bool:
        """True if the only allowed call is complete, so that any further text is dropped."""
        # Without fragments, a complete call is passed on although its reader may still wait for its closing text.
        return self._one and self._calls > 0 and (self._reader is None or not self._fragments)

    def _end_call(self, end: int) -> None:
        if self._calls > self._calls_before:
            self.calls_at.append((self._call_start, end))

    def _split_at_call(self, text: str) -> tuple[str, str]:
        """Split off the text before a call; start a reader at a call, or hold back its possible beginning."""
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
        kept_back = max((start_of(mark, text) for mark in self._form.marks), default=0)
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
