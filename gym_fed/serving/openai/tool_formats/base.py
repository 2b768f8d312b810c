"""The base class of the forms in which models write tool calls."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

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


Row = dict[str, Any]
"""A message as templates get it."""


class ToolFormat(ABC):
    """How one family of models writes tool calls: ``tool_format``. One object belongs to one chat template."""

    order: ClassVar[int] = 100
    """``auto`` tries formats by rising order, ours before those of other packages."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts that announce a call wherever they stand. Where the tokenizer has one as a control token, that is meant."""

    controls: ClassVar[tuple[str, ...]] = ()
    """Further texts of the form that may be control tokens."""

    bare: ClassVar[str] = ""
    """A character that announces a call at the beginning of an answer."""

    close: ClassVar[str] = ""
    """The text that ends a call, if there is one."""

    opening: ClassVar[str] = ""
    """What a prompt ends with whose answer must be a call."""

    describes: ClassVar[bool] = False
    """Whether ``prepare`` brings the tools into the messages, so that the template needs to know none."""

    def learn(self, written: str) -> bool:
        """Return whether a template writes this form.

        Args:
            written: What it made of a call of the tool ``probe``; the caller checks that ``reader`` finds that call.
        """
        return True

    def hinted(self, shown: str) -> bool:
        """Return whether a template that shows no call describes this form; ``shown`` is its text of the tools."""
        return False

    @abstractmethod
    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        """A reader for the text after a mark.

        Args:
            mark: The mark; for a bare call what stands before its first character.
            tools: That may be called.
            fragments: Whether calls may be passed on while they are written.
        """

    @abstractmethod
    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        """The grammar of an answer whose calls are held to the parameters of their tools.

        Args:
            tools: That may be called.
            one: Whether one call is the most.
            required: Whether the answer is one call, and begins after ``opening``.

        Raises:
            CannotHold: For parameters that this form cannot be held to.
        """

    def prepare(self, rows: Sequence[Row], tools: Sequence[Row], *, system: bool) -> list[Row]:
        """The messages as the model's template takes them.

        Args:
            rows: The rows of the request.
            tools: The tools of the request, as templates get them.
            system: Whether the template takes a system message.
        """
        return list(rows)

    def call_id(self) -> str:
        """The id of a new call."""
        return f"call_{secrets.token_hex(12)}"


class CannotHold(ValueError):
    """Parameters that a form cannot be held to; says which and why."""


class CallGrammar:
    """A grammar in Lark's notation as llguidance takes it, with the schemas that it refers to.

    Args:
        lark: Rules; ``start`` is the first. ``TEXT`` is defined. Texts and marks are written by ``quoted``.
        schemas: JSON schemas by the name that stands in ``lark`` after ``@``.
    """

    def __init__(self, lark: str, schemas: Mapping[str, dict[str, Any]]) -> None:
        self.lark = lark
        self.schemas = dict(schemas)


def bodies(tools: Tools, begin: str, end: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The alternatives of a call for a ``CallGrammar``, and its schemas.

    Args:
        tools: That may be called.
        begin: What stands before the arguments, in Lark's notation; ``NAME`` in it is the tool's name.
        end: What stands after them.
    """
    rules, schemas = [], {}
    for number, (name, parameters) in enumerate(tools.items()):
        schema = f"arguments_{number}"
        schemas[schema] = parameters or {"type": "object"}
        rules.append(f"{begin.replace('NAME', name)} @{schema} {end}")
    return " | ".join(rules), schemas


_SPECIAL = "\x00"


def quoted(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text)


def mark(text: str) -> str:
    """A mark in the rules of a ``CallGrammar``: a control token where the tokenizer has it as one, or else a text."""
    return f"{_SPECIAL}{text}{_SPECIAL}"


def with_control_tokens(lark: str, control: Mapping[str, int]) -> str:
    """Rules in which the marks are written out.

    A rule ``NAME[lazy]: TEXT mark`` ends free text at the first mark. A control token ends it by itself.
    """

    def lazy(found: re.Match[str]) -> str:
        rule, before, text = found.groups()
        if text in control:
            return f"{rule}: {before} <[{control[text]}]>"
        return f"{rule}[lazy]: {before} {quoted(text)}"

    lark = re.sub(rf"(\w+)\[lazy\]: (\w+) {_SPECIAL}([^{_SPECIAL}]*){_SPECIAL}", lazy, lark)
    return re.sub(
        rf"{_SPECIAL}([^{_SPECIAL}]*){_SPECIAL}",
        lambda found: f"<[{control[found[1]]}]>" if found[1] in control else quoted(found[1]),
        lark,
    )
