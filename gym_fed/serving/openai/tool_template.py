"""Detect the tool call format of a model's chat template by rendering a call, and prepare tools for it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from gym_fed.core.registries import TOOL_FORMATS
from gym_fed.core.text import counted
from gym_fed.serving.engine.guided import MAX_SCHEMA_CHARACTERS
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.refusals import RequestError, unsupported_parameter
from gym_fed.serving.openai.schemas import ChatRequest, Function, NamedTool
from gym_fed.serving.openai.tool_formats.base import (
    Call,
    CallParser,
    CannotHold,
    Row,
    ToolFormat,
    Tools,
    with_control_tokens,
)

log = logging.getLogger("gym_fed")

AUTO = "auto"
_FALLBACK = "described"
_QUESTION: list[Row] = [{"role": "user", "content": "x"}]
_PROBE: Row = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Finds out whether the template shows tools.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_ARGUMENTS = {"x": 1}
_CALL: Row = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}
    ],
}

Render = Callable[..., str]
"""A function that renders messages and tools, with the generation prompt unless ``prompt`` is False. Raises
``RequestError``."""


class ToolTemplate:
    """The tools of one model's chat template.

    Args:
        render: Function that renders the template.
        control: Ids of the tokenizer's control tokens, by their texts.
        name: The name of the format; ``auto`` detects it.
        parser: Function that returns the name of the model's reasoning parser; None: it is not checked.

    Attributes:
        malformed: Number of texts in answers that looked like calls but were malformed.
    """

    def __init__(
        self,
        render: Render,
        control: Mapping[str, int],
        name: str = AUTO,
        parser: Callable[[], str] | None = None,
    ) -> None:
        self._render, self._control, self._name, self._parser = render, control, name, parser
        self._lock = threading.Lock()
        self.malformed = 0

    @property
    def format(self) -> ToolFormat:
        """The format of the model's calls.

        Raises:
            RequestError: For a template that shows tools but writes calls in an unknown format, or in one that needs
                a different reasoning parser.
        """
        form = self._found
        if isinstance(form, RequestError):
            raise RequestError(form.message, param=form.param, name=form.name, code=form.code, hint=form.hint)
        return form

    @cached_property
    def _found(self) -> ToolFormat | RequestError:
        """Detect the format once; an error is also cached."""
        try:
            form = self._find()
            self._require_parser(form)
        except RequestError as error:
            return error.with_traceback(None)
        return form

    def _find(self) -> ToolFormat:
        if self._name != AUTO:
            form: ToolFormat = TOOL_FORMATS.new(self._name)
            form.learn(self._written)
            return self._usable(form)
        if not self._shows_tools:
            fallback: ToolFormat = TOOL_FORMATS.new(_FALLBACK)
            return fallback
        forms: list[tuple[str, ToolFormat]] = sorted(
            ((name, TOOL_FORMATS.new(name)) for name in TOOL_FORMATS.usable()),
            key=lambda one: (one[1].order, one[0] not in TOOL_FORMATS.own(), one[0]),
        )
        for _, form in forms:
            if _reads(form, self._written) and form.learn(self._written):
                return form
        for _, form in forms:
            if form.hinted(self._shown):
                return form
        raise unsupported_parameter(
            "tools",
            "field 'tools' is not supported: this model's chat template writes calls in an unknown format",
            f"set the server's tool_format to {_FALLBACK} to describe tools in a system message instead",
        )

    def prepare(self, rows: list[Row], tools: list[Row] | None) -> tuple[list[Row], list[Row] | None]:
        """Prepare messages and tools for the template.

        Raises:
            RequestError: See ``format``; also if the template would not show calls among the messages.
        """
        if not tools and not any("tool_calls" in row or row["role"] == "tool" for row in rows):
            return rows, tools
        form = self.format
        prepared = form.prepare(rows, tools or (), system=self._takes_system)
        if form.describes:
            return prepared, None
        if any("tool_calls" in row for row in prepared):
            self._require_calls_shown(prepared, tools)
        return prepared, tools

    def shown_ids(self) -> tuple[int, ...]:
        """Return the ids of control tokens that must appear in an answer's text for calls to be recognised."""
        form = self.format
        return tuple(self._control[text] for text in (*form.marks, *form.controls) if text in self._control)

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> str:
        """Return the grammar of an answer, in the engine's form.

        Raises:
            RequestError: For parameters that the format cannot be constrained to.
        """
        try:
            grammar = self.format.grammar(tools, one=one, required=required)
        except CannotHold as error:
            raise RequestError(
                f"field 'tools': {error}",
                param="tools",
                name="invalid_json_schema",
                hint="omit strict and tool_choice, or simplify the schema",
            ) from error
        lark = with_control_tokens(grammar.lark, self._control)
        text = json.dumps({"lark": f"{lark}TEXT: /(.|\\n)*/\n", "schemas": grammar.schemas})
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(
                f"field 'tools': schemas of {counted(len(text), 'character')}; at most "
                f"{MAX_SCHEMA_CHARACTERS:,} are allowed",
                param="tools",
                name="invalid_json_schema",
            )
        return text

    def count_malformed(self) -> None:
        """Count a text that looked like a call but is malformed; log the first one."""
        with self._lock:
            self.malformed += 1
            first = self.malformed == 1
        if first:
            log.warning(
                "a text in an answer looked like a tool call in the format %s but was malformed; it was sent as text "
                "(gym_api_malformed_tool_calls of /metrics counts them)",
                type(self.format).__name__.lower(),
            )

    @cached_property
    def _shows_tools(self) -> bool:
        return self._shown != self._render(_QUESTION, None)

    @cached_property
    def _shown(self) -> str:
        return self._render(_QUESTION, [_PROBE])

    @cached_property
    def _written(self) -> str:
        """Render a call with the template; empty if it refuses."""
        try:
            rendered = self._render([*_QUESTION, _CALL], [_PROBE], prompt=False)
        except RequestError:
            return ""
        same = next(
            (at for at, pair in enumerate(zip(self._shown, rendered, strict=False)) if pair[0] != pair[1]), -1
        )
        return rendered[len(self._shown) if same < 0 else same :]

    @cached_property
    def _takes_system(self) -> bool:
        try:
            shown = self._render([{"role": "system", "content": "a system's message"}, *_QUESTION], None)
        except RequestError:
            return False
        return "a system's message" in shown

    def _usable(self, form: ToolFormat) -> ToolFormat:
        if form.describes or self._shows_tools:
            return form
        raise unsupported_parameter(
            "tools",
            "field 'tools' is not supported: this model's chat template does not show tools",
            f"set the server's tool_format to {AUTO} to describe them in a system message instead",
        )

    def _require_parser(self, form: ToolFormat) -> None:
        if form.reasoning_parser and self._parser is not None and self._parser() != form.reasoning_parser:
            raise unsupported_parameter(
                "tools",
                "field 'tools' is not supported: this model's tool calls require the reasoning parser "
                f"{form.reasoning_parser}, but the server uses {self._parser()}",
                f"set the server's reasoning_parser to {form.reasoning_parser}",
            )

    def _require_calls_shown(self, rows: list[Row], tools: list[Row] | None) -> None:
        silent = [{key: value for key, value in row.items() if key != "tool_calls"} for row in rows]
        shown = self._render(rows, tools)
        try:
            without_calls = self._render(silent, tools)
        except RequestError:  # a template that refuses results without their calls does show calls
            return
        if shown == without_calls:
            raise unsupported_parameter(
                "messages",
                "tool_calls in messages are not supported: this model's chat template does not show them",
            )


def _reads(form: ToolFormat, written: str) -> bool:
    """Return True if a format finds the call in the rendered text."""
    parser = CallParser(form, {"probe": None})
    parts = [*parser.feed(written), *parser.end()]
    return [(call.name, json.loads(call.arguments)) for call in parts if isinstance(call, Call)] == [
        ("probe", _ARGUMENTS)
    ]


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse:
    """The tools of one request with one model's template.

    Attributes:
        shown: The tools for the template; None if ``tool_choice`` is ``none``.
        required: True if the answer must be a call.
        held: True if a grammar constrains calls to the parameters of their tools, because a call is required or a tool
            is ``strict``. The model then writes free text until it begins a call.
    """

    def __init__(self, request: ChatRequest, template: ToolTemplate) -> None:
        self._template = template
        self._request = request
        self.shown = _shown(request)
        self.required = isinstance(request.tool_choice, NamedTool) or request.tool_choice == "required"
        self._one = self.required or request.parallel_tool_calls is False
        strict = any(tool.function.strict for tool in request.tools or [])
        self.held = self.shown is not None and (self.required or strict)

    @property
    def opens_call(self) -> bool:
        """True if the answer begins inside a call, so that it has no thought."""
        return self.required and self.shown is not None and bool(self._template.format.opening)

    def sampling(self) -> dict[str, Any]:
        """Return the engine's parameters for the tools.

        Raises:
            RequestError: For parameters that the model's format cannot be constrained to.
        """
        if self.shown is None:
            return {}
        parameters: dict[str, Any] = {"shown_token_ids": self._template.shown_ids()}
        close = self._template.format.close
        if self.held:
            text = self._template.grammar(self._held_tools(), one=self._one, required=self.required)
            parameters["grammar"] = Grammar("calls", text)
        elif self._one and close:
            parameters["also_stop"] = (close,)
        return parameters

    def parser(self, *, fragments: bool) -> CallParser | None:
        """Create a parser for an answer; None if it cannot have calls.

        Args:
            fragments: True if the caller accepts calls in parts; only constrained calls are sent in parts.
        """
        if self.shown is None:
            return None
        return CallParser(
            self._template.format,
            {tool.function.name: tool.function.parameters for tool in self._callable()},
            fragments=fragments and self.held,
            opened=self.opens_call,
            one=self._one,
            on_malformed=self._template.count_malformed,
        )

    def _callable(self) -> list[Any]:
        choice, tools = self._request.tool_choice, self._request.tools or []
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return tools

    def _held_tools(self) -> Tools:
        """Return the parameters of each tool; None for any object, if a call is optional and the tool not strict."""
        return {
            tool.function.name: _parameters(tool.function) if self.required or tool.function.strict else None
            for tool in self._callable()
        }


def _parameters(function: Function) -> dict[str, Any]:
    """Return the parameters of a function; as in OpenAI's API, a function without them takes no arguments."""
    return _NO_PARAMETERS if function.parameters is None else function.parameters


def _shown(request: ChatRequest) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]
